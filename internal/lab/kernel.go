package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"

	"github.com/forkvm/forkvm/guest/kernel"
)

// kernelPackage is the package that stands for Debian's current cloud kernel of the 6.12 series.
const kernelPackage = "linux-image-6.12-cloud-amd64"

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

// kernelFiles is where a kernel to boot comes from, and what is made of it, which is cached: the kernel itself is read
// only when something of that is missing.
type kernelFiles struct {
	cache cache
	path  string // Debian package, or a directory with one unpacked
	key   string
	open  func() (*kernel.Kernel, error) // opens it once
}

// findKernel takes the package file or unpacked package at path, or, for "", the cached or fetched Debian kernel.
func findKernel(ctx context.Context, c cache, path string) (kernelFiles, error) {
	if path == "" {
		var err error
		if path, err = FetchKernel(ctx, c.dir); err != nil {
			return kernelFiles{}, err
		}
	}
	key, err := statKey(path)
	if err != nil {
		return kernelFiles{}, fmt.Errorf("open kernel: %w", err)
	}
	unpacked := filepath.Join(c.dir, "kernels")
	return kernelFiles{c, path, key, sync.OnceValues(func() (*kernel.Kernel, error) {
		k, err := kernel.OpenCached(path, unpacked)
		_ = touch(unpacked) // without it, it is unpacked again when it has become old
		return k, err
	})}, nil
}

// image returns the path of the kernel as an ELF file: to unpack it under emulation would take longer than the rest of
// its boot.
func (k kernelFiles) image() (string, error) {
	return k.cache.get("vmlinux-"+k.key, func(to string) error {
		opened, err := k.open()
		if err != nil {
			return err
		}
		return os.WriteFile(to, opened.Image, 0o644)
	})
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
