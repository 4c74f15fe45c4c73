// Package testimage makes small images for tests that boot guests: the guest agent and busybox, on a disk or in memory, in about a second.
package testimage

import (
	"archive/tar"
	"context"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/guest/initramfs"
)

// DiskSize is the size of a test image's disk in bytes.
const DiskSize = 64 << 20

// Config says what to make. The zero values of Disk and Mode give a guest whose root file system is in memory.
type Config struct {
	Output  string // directory that becomes the image; see image.Config
	Kernel  string // see kernel.Open
	Cache   string // directory to keep unpacked kernels in
	Agent   string // path of the guest agent
	Busybox string // path of a static busybox; empty: /bin/busybox
	Disk    bool   // the root file system is a disk of DiskSize
	Mode    string // initramfs.ModePID1 (the default), or ModeHandover to busybox's init
	// ExtraCommandLine is added to the kernel's.
	ExtraCommandLine string
}

// inittab makes busybox's init a service manager with nothing to do.
const inittab = "::sysinit:/bin/true\n::respawn:/bin/sleep 1000000\n::shutdown:/bin/true\n"

// texts are the files of the root file system besides busybox.
var texts = []struct{ path, content string }{
	{"/etc/group", "root:x:0:\nuser:x:1000:\n"},
	{"/etc/hosts", "127.0.0.1\tlocalhost\n"},
	{"/etc/inittab", inittab},
	{"/etc/machine-id", ""}, // filled in by whoever boots it
	{"/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"},
}

// Build makes an image. Users root and user (1000) exist in it.
func Build(ctx context.Context, c Config) (*image.Image, error) {
	i, err := build(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("build test image: %w", err)
	}
	return i, nil
}

func build(ctx context.Context, c Config) (*image.Image, error) {
	files, err := rootFiles(ctx, c.Busybox)
	if err != nil {
		return nil, err
	}
	config := image.Config{
		Output:           c.Output,
		Kernel:           c.Kernel,
		KernelCache:      c.Cache,
		Agent:            c.Agent,
		Mode:             c.Mode,
		ExtraCommandLine: c.ExtraCommandLine,
		Hostname:         "test",
	}
	if config.Mode == "" {
		config.Mode = initramfs.ModePID1
	}
	if !c.Disk {
		config.Files = files
		return image.Build(ctx, config)
	}
	archive, err := writeArchive(filepath.Dir(filepath.Clean(c.Output)), files)
	if err != nil {
		return nil, err
	}
	defer os.Remove(archive)
	config.Rootfs, config.Size = archive, DiskSize
	return image.Build(ctx, config)
}

// rootFiles are busybox, the links by which it is called, and a few texts.
func rootFiles(ctx context.Context, busybox string) ([]initramfs.File, error) {
	if busybox == "" {
		busybox = "/bin/busybox"
	}
	if err := checkStatic(busybox); err != nil {
		return nil, err
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	list, err := exec.CommandContext(ctx, busybox, "--list-full").Output()
	if err != nil {
		return nil, fmt.Errorf("list what busybox can do: %w", err)
	}
	files := []initramfs.File{{Path: "/bin/busybox", Mode: 0o755, Content: program}}
	for name := range strings.FieldsSeq(string(list)) {
		if strings.Contains(name, "/") && path.Base(name) != "busybox" {
			files = append(files, initramfs.File{Path: path.Join("/", name), Target: "/bin/busybox"})
		}
	}
	for _, t := range texts {
		files = append(files, initramfs.File{Path: t.path, Mode: 0o644, Content: []byte(t.content)})
	}
	return files, nil
}

func checkStatic(busybox string) error {
	f, err := elf.Open(busybox)
	if err != nil {
		return fmt.Errorf("open busybox: %w (apt-get install busybox-static)", err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return fmt.Errorf("%s is not static (apt-get install busybox-static)", busybox)
	}
	return nil
}

// writeArchive writes the files as a tar to a temporary file and returns its path.
func writeArchive(dir string, files []initramfs.File) (string, error) {
	f, err := os.CreateTemp(dir, ".testimage-*.tar")
	if err != nil {
		return "", err
	}
	w := tar.NewWriter(f)
	headers := []tar.Header{
		{Typeflag: tar.TypeDir, Name: "root", Mode: 0o700},
		{Typeflag: tar.TypeDir, Name: "home/user", Mode: 0o755, Uid: 1000, Gid: 1000},
	}
	for _, h := range headers {
		if err == nil {
			err = w.WriteHeader(&h)
		}
	}
	for _, file := range files {
		if err == nil {
			err = writeFile(w, file)
		}
	}
	if err == nil {
		err = w.Close()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

func writeFile(w *tar.Writer, f initramfs.File) error {
	h := tar.Header{Typeflag: tar.TypeReg, Name: f.Path[1:], Mode: int64(f.Mode), Size: int64(len(f.Content))}
	if f.Target != "" {
		h = tar.Header{Typeflag: tar.TypeSymlink, Name: f.Path[1:], Linkname: f.Target}
	}
	if err := w.WriteHeader(&h); err != nil {
		return err
	}
	_, err := w.Write(f.Content)
	return err
}
