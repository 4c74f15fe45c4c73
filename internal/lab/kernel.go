package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// kernelPackage is the package that stands for Debian's current cloud kernel of the 6.12 series.
const kernelPackage = "linux-image-6.12-cloud-amd64"

// kernel is an unpacked kernel package.
type kernel struct {
	version string
	image   string // what QEMU boots
	modules string // lib/modules/VERSION
}

// FetchKernel returns a Debian kernel package (.deb) from the cache, which it fills through apt-get when empty.
func FetchKernel(ctx context.Context, cacheDir string) (string, error) {
	c, err := openCache(cacheDir)
	if err != nil {
		return "", err
	}
	dir, err := c.get("package-"+kernelPackage, func(path string) error { return downloadKernel(ctx, path) })
	if err != nil {
		return "", err
	}
	found, err := filepath.Glob(filepath.Join(dir, "linux-image-*.deb"))
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("find kernel package in %s: %d files, want 1", dir, len(found))
	}
	return found[0], nil
}

// downloadKernel has apt-get fetch the newest package of the series into dir. Package lists that are missing or older
// than the archive are renewed once, when this user may.
func downloadKernel(ctx context.Context, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	err := tryDownloadKernel(ctx, dir)
	if err == nil || os.Geteuid() != 0 {
		if err != nil {
			err = fmt.Errorf("%w (are the package lists up to date? apt-get update)", err)
		}
		return err
	}
	if _, updateErr := output(ctx, "", "apt-get", "-q", "update"); updateErr != nil {
		return errors.Join(err, updateErr)
	}
	return tryDownloadKernel(ctx, dir)
}

var dependsLine = regexp.MustCompile(`(?m)^\s*Depends: (linux-image-[^\s<>]+)$`)

func tryDownloadKernel(ctx context.Context, dir string) error {
	text, err := output(ctx, "", "apt-cache", "depends", kernelPackage)
	if err != nil {
		return err
	}
	match := dependsLine.FindSubmatch(text)
	if match == nil {
		return fmt.Errorf("find kernel: package %s names no kernel", kernelPackage)
	}
	_, err = output(ctx, dir, "apt-get", "-q", "download", string(match[1]))
	return err
}

// openKernel finds the kernel to boot: an unpacked package's directory, a package file, or, for "", the cached or
// fetched Debian kernel.
func openKernel(ctx context.Context, c cache, path string) (kernel, error) {
	if path == "" {
		var err error
		if path, err = FetchKernel(ctx, c.dir); err != nil {
			return kernel{}, err
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		return kernel{}, fmt.Errorf("open kernel: %w", err)
	}
	key, err := statKey(path)
	if err != nil {
		return kernel{}, err
	}
	dir := path
	if !info.IsDir() {
		dir, err = c.get("kernel-"+key, func(to string) error {
			_, err := output(ctx, "", "dpkg-deb", "-x", path, to)
			return err
		})
		if err != nil {
			return kernel{}, err
		}
	}
	k, err := kernelIn(dir)
	if err != nil {
		return kernel{}, err
	}
	// Unpacking the kernel under emulation would take longer than the rest of its boot.
	unpacked, err := c.get("vmlinux-"+key, func(to string) error { return unpackKernel(ctx, k.image, to) })
	if err == nil {
		k.image = unpacked
	} else if !errors.Is(err, errors.ErrUnsupported) {
		return kernel{}, err
	}
	return k, nil
}

// kernelIn finds image and modules in an unpacked package.
func kernelIn(dir string) (kernel, error) {
	images, _ := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	if len(images) != 1 {
		return kernel{}, fmt.Errorf("open kernel %s: %d files boot/vmlinuz-*, want 1", dir, len(images))
	}
	version := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	for _, base := range []string{"lib", "usr/lib"} {
		modules := filepath.Join(dir, base, "modules", version)
		if _, err := os.Stat(modules); err == nil {
			return kernel{version, images[0], modules}, nil
		}
	}
	return kernel{}, fmt.Errorf("open kernel %s: no modules of version %s: %w", dir, version, fs.ErrNotExist)
}

// unpackKernel takes the ELF kernel out of a zstd-compressed bzImage (the kernel's Documentation/arch/x86/boot.rst). Any
// other image is errors.ErrUnsupported, and is booted as it is.
func unpackKernel(ctx context.Context, image, to string) error {
	data, err := os.ReadFile(image)
	if err != nil {
		return err
	}
	payload := bzImagePayload(data)
	if !bytes.HasPrefix(payload, []byte{0x28, 0xb5, 0x2f, 0xfd}) {
		return fmt.Errorf("unpack kernel %s: %w", image, errors.ErrUnsupported)
	}
	program, err := findProgram("zstd")
	if err != nil {
		return err
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, "-dc")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(payload), out, &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("unpack kernel %s: %w %s", image, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return nil
}

// bzImagePayload is the compressed kernel of a bzImage, without the 4 bytes of its unpacked size at the end; nil for
// anything else. The setup header's fields: setup_sects at 0x1f1, "HdrS" at 0x202, payload_offset at 0x248 and
// payload_length at 0x24c, counted from the end of the setup sectors.
func bzImagePayload(data []byte) []byte {
	if len(data) < 0x250 || string(data[0x202:0x206]) != "HdrS" {
		return nil
	}
	setup := uint64(data[0x1f1])
	if setup == 0 {
		setup = 4
	}
	start := (setup+1)*512 + uint64(binary.LittleEndian.Uint32(data[0x248:]))
	end := start + uint64(binary.LittleEndian.Uint32(data[0x24c:]))
	if start+4 > end || end > uint64(len(data)) {
		return nil
	}
	return data[start : end-4]
}

// output runs a program of this machine and returns what it printed. Its error has what it complained of.
func output(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	program, err := findProgram(name)
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Stderr = dir, &stderr
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("run %s: %w\n%s", name, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}
