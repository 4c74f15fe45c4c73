package initramfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const newRoot = "/newroot"

// mountRoot mounts the root device at newRoot.
func mountRoot(c Config, failed []error) error {
	if err := waitForDevice(c.Root, 10*time.Second); err != nil {
		return fmt.Errorf("root device %s did not appear: %s", c.Root, diagnose("/sys", failed))
	}
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return err
	}
	var flags uintptr
	if c.RootReadOnly {
		flags = unix.MS_RDONLY
	}
	err := unix.Mount(c.Root, newRoot, c.RootType, flags, "")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("mount root %s: this kernel has no file system %q, and no module for it was loaded", c.Root, c.RootType)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("mount root %s: no usable %s file system on it", c.Root, c.RootType)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES):
		return fmt.Errorf("mount root %s: the disk is read-only and root_read_only is not set", c.Root)
	}
	return fmt.Errorf("mount root %s (%s): %w", c.Root, c.RootType, err)
}

// waitForDevice waits for a node in devtmpfs. Loading a driver usually creates
// it before it returns.
func waitForDevice(path string, limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		_, err := os.Stat(path)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(pause)
	}
}

// diagnose says, from what sysfs shows, what stands between the kernel and a
// virtio disk. sys is the mount point of sysfs.
func diagnose(sys string, failed []error) string {
	var said []string
	say := func(format string, a ...any) { said = append(said, fmt.Sprintf(format, a...)) }
	has := func(path string) bool {
		_, err := os.Stat(filepath.Join(sys, path))
		return err == nil
	}
	if !has("bus/virtio/drivers/virtio_blk") {
		say("no virtio_blk driver")
	}
	if devices := names(filepath.Join(sys, "bus/virtio/devices")); len(devices) == 0 {
		if !has("bus/platform/drivers/virtio-mmio") {
			say("no virtio_mmio driver")
		}
		say("no virtio devices")
	} else if n := blockDevices(sys, devices); n == 0 {
		say("%d virtio devices, none of them a disk", len(devices))
	}
	if disks := names(filepath.Join(sys, "class/block")); len(disks) == 0 {
		say("no disks at all")
	} else {
		say("disks found: %s", strings.Join(disks, " "))
	}
	for _, err := range failed {
		say("%v", err)
	}
	return strings.Join(said, "; ")
}

// blockDevices counts virtio devices of type 2, block (virtio 1.2, section 5).
func blockDevices(sys string, devices []string) int {
	n := 0
	for _, d := range devices {
		b, _ := os.ReadFile(filepath.Join(sys, "bus/virtio/devices", d, "device"))
		if strings.TrimSpace(string(b)) == "0x0002" {
			n++
		}
	}
	return n
}

func names(dir string) []string {
	entries, _ := os.ReadDir(dir)
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// switchRoot makes newRoot the root directory and frees the initramfs. The
// early mounts move along; a mount point that the new root lacks is created.
func switchRoot() error {
	for _, m := range early {
		target := newRoot + m.path
		if err := os.MkdirAll(target, 0o755); err != nil && !isDir(target) {
			return fmt.Errorf("root file system has no %s: %w", m.path, err)
		}
		if err := unix.Mount(m.path, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s into the root file system: %w", m.path, err)
		}
	}
	clearInitramfs()
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	// pivot_root does not work on the initial file system; this is how its
	// documentation says to leave it (Documentation/filesystems/ramfs-rootfs-initramfs.rst).
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root file system to /: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	return os.Chdir("/")
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// clearInitramfs deletes everything on the initial file system: it is memory,
// and would be part of every snapshot.
func clearInitramfs() {
	var st unix.Stat_t
	var fs unix.Statfs_t
	if unix.Stat("/", &st) != nil || unix.Statfs("/", &fs) != nil {
		return
	}
	if fs.Type != unix.RAMFS_MAGIC && fs.Type != unix.TMPFS_MAGIC {
		return
	}
	clearDir("/", st.Dev)
}

// clearDir empties a directory and stays on its device.
func clearDir(dir string, dev uint64) {
	for _, name := range names(dir) {
		path := filepath.Join(dir, name)
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || st.Dev != dev {
			continue
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			clearDir(path, dev)
		}
		os.Remove(path)
	}
}
