package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/forkvm/forkvm/internal/lab/wire"
	"golang.org/x/sys/unix"
)

// mountAll mounts the disks of the plan, in its order.
func mountAll(plan wire.Plan) error {
	disks, err := disksBySerial("/sys/block")
	if err != nil {
		return err
	}
	for _, m := range plan.Mounts {
		device, ok := disks[m.Serial]
		if !ok {
			return fmt.Errorf("mount %s: no disk with serial %q", m.Path, m.Serial)
		}
		if err := mountDisk(device, m); err != nil {
			return fmt.Errorf("mount %s at %s: %w", device, m.Path, err)
		}
	}
	return nil
}

func disksBySerial(blocks string) (map[string]string, error) {
	entries, err := os.ReadDir(blocks)
	if err != nil {
		return nil, err
	}
	disks := make(map[string]string)
	for _, entry := range entries {
		serial, err := os.ReadFile(filepath.Join(blocks, entry.Name(), "serial"))
		if err != nil {
			continue // no virtio disk
		}
		disks[strings.TrimSpace(string(serial))] = "/dev/" + entry.Name()
	}
	return disks, nil
}

// mountDisk mounts a disk aside and shows the part that the plan names where the plan says.
func mountDisk(device string, m wire.Mount) error {
	aside := filepath.Join("/run/lab", m.Serial)
	if err := os.MkdirAll(aside, 0o755); err != nil {
		return err
	}
	// noinit_itable: no kernel thread that writes empty inode tables for minutes, and that a measurement would count.
	if err := unix.Mount(device, aside, "ext4", unix.MS_NOATIME, "noinit_itable"); err != nil {
		return err
	}
	// Made by mke2fs, it is not among the files that were given; where it holds something it stays.
	_ = os.Remove(filepath.Join(aside, "lost+found"))
	if err := bind(filepath.Join(aside, m.Source), m.Path, m.File); err != nil {
		return err
	}
	for _, b := range m.Binds {
		source := filepath.Join(aside, b.Source)
		if err := os.MkdirAll(source, 0o755); err != nil {
			return err
		}
		if b.Public {
			if err := os.Chmod(source, 0o777|os.ModeSticky); err != nil {
				return err
			}
		}
		if err := bind(source, b.Path, false); err != nil {
			return err
		}
	}
	return nil
}

func bind(source, target string, file bool) error {
	place := target
	if file {
		place = filepath.Dir(target)
	}
	if err := os.MkdirAll(place, 0o755); err != nil {
		return err
	}
	if file {
		empty, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return err
		}
		empty.Close()
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", source, target, err)
	}
	return nil
}
