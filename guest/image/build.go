package image

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/forkvm/forkvm/guest/initramfs"
	"github.com/forkvm/forkvm/guest/internal/publish"
	"github.com/forkvm/forkvm/guest/kernel"
	"github.com/forkvm/forkvm/guest/rootfs"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// CommandLine is what every guest's kernel is told. The devices are found through ACPI, so none is named here.
const CommandLine = "console=ttyS0 " + // the serial port, and nothing else
	"panic=-1 reboot=a " + // a panic ends the machine at once; resets go through ACPI, never by a triple fault, which would look like a crash
	"quiet " + // each character on the console costs an exit; panics are printed all the same
	"idle=halt " + // an idle processor goes back to the host at once, instead of polling on the host's time
	"pci=off i8042.noaux i8042.nokbd 8250.nr_uarts=1 " + // do not look for hardware that is not there
	"random.trust_cpu=on " +
	"nowatchdog tsc=nowatchdog " + // a machine that was paused looks to them like one that hangs, and they wake it up to look
	"sysctl.vm.stat_interval=60 " + // seconds; each look at the counters of memory wakes an idle machine up
	"sysctl.vm.compaction_proactiveness=0" // moves pages that nobody needs moved, which makes them the clone's own

// RootDevice is the disk with the root file system: the first one.
const RootDevice = "/dev/vda"

// Config says what an image is made from.
type Config struct {
	// Output is the directory that the image becomes. It must not exist, or be empty.
	Output string
	// Kernel is a Debian package, a bzImage or ELF file, or a directory tree: see kernel.Open.
	Kernel string
	// KernelCache is a directory in which unpacked kernels are kept for the next time; empty: none is.
	KernelCache string
	// Rootfs is a directory or a tar archive: see rootfs.Config. Empty: the initramfs is the root file system.
	Rootfs string
	// Agent is the path of the guest agent, a static x86-64 program.
	Agent string
	// Mode is initramfs.ModeHandover or initramfs.ModePID1. Empty: handover if the root file system has a program /sbin/init.
	Mode string
	// ExtraCommandLine is added to CommandLine, so that it wins.
	ExtraCommandLine string
	// Size of the root file system in bytes; 0: see rootfs.Config.
	Size int64
	// Hostname that the guest begins with.
	Hostname string
	// Files go into the initramfs in addition.
	Files []initramfs.File
	// Drivers are loaded in addition to kernel.Required and kernel.Optional.
	Drivers []kernel.Driver
	// CreatedAt is noted in the manifest; zero: now.
	CreatedAt time.Time
}

// AgentError says that a file cannot be the guest agent.
type AgentError struct{ Path, Reason string }

func (e *AgentError) Error() string {
	return fmt.Sprintf("%s cannot be the guest agent: %s", e.Path, e.Reason)
}

// Build makes an image. It needs no privileges.
func Build(ctx context.Context, c Config) (*Image, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("build image (%s): %w", c.Output, err)
	}
	if err := checkAgent(c.Agent); err != nil {
		return nil, fmt.Errorf("build image (%s): %w", c.Output, err)
	}
	b := builder{Config: c, manifest: Manifest{
		Schema:      Schema,
		CreatedAt:   c.CreatedAt,
		CommandLine: strings.TrimSpace(CommandLine + " " + c.ExtraCommandLine),
		Mode:        c.Mode,
		Hostname:    c.Hostname,
		Files:       map[Part]FileInfo{},
	}}
	if b.manifest.CreatedAt.IsZero() {
		b.manifest.CreatedAt = time.Now()
	}
	b.manifest.CreatedAt = b.manifest.CreatedAt.UTC().Truncate(time.Second)
	if err := publish.Directory(c.Output, func(dir string) error { return b.run(ctx, dir) }); err != nil {
		return nil, fmt.Errorf("build image (%s): %w", c.Output, err)
	}
	return Open(c.Output)
}

// check finds what is wrong with the configuration before any work is done.
func (c Config) check() error {
	switch c.Mode {
	case "", initramfs.ModePID1:
	case initramfs.ModeHandover:
		if c.Rootfs == "" {
			return fmt.Errorf("mode %s needs a root file system", c.Mode)
		}
	default:
		return fmt.Errorf("mode %q is neither %s nor %s", c.Mode, initramfs.ModeHandover, initramfs.ModePID1)
	}
	if entries, err := os.ReadDir(c.Output); err == nil && len(entries) > 0 {
		return fmt.Errorf("directory is there and not empty: %w", os.ErrExist)
	}
	return nil
}

// checkAgent makes sure that the first program of the guest will start: nothing would say why it did not.
func checkAgent(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		var format *elf.FormatError
		if errors.As(err, &format) || errors.Is(err, io.EOF) {
			return &AgentError{path, "it is no program"}
		}
		return err
	}
	defer f.Close()
	if f.Machine != elf.EM_X86_64 || f.Class != elf.ELFCLASS64 {
		return &AgentError{path, fmt.Sprintf("it is for %s", f.Machine)}
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return &AgentError{path, "it is not static (CGO_ENABLED=0 makes it so)"}
		}
	}
	return nil
}

// builder makes the parts one after another and notes each in the manifest.
type builder struct {
	Config
	manifest Manifest
	modules  []initramfs.Module
}

func (b *builder) run(ctx context.Context, dir string) error {
	for _, step := range []func(context.Context, string) error{b.addKernel, b.addRootfs, b.addInitrd} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(ctx, dir); err != nil {
			return err
		}
	}
	if err := b.manifest.seal(); err != nil {
		return err
	}
	if err := b.manifest.check(); err != nil {
		return err
	}
	text, err := json.MarshalIndent(b.manifest, "", "  ")
	if err != nil {
		return err
	}
	return publish.File(filepath.Join(dir, manifestName), 0o444, func(f *os.File) error {
		_, err := f.Write(append(text, '\n'))
		return err
	})
}

func (b *builder) addKernel(ctx context.Context, dir string) error {
	var k *kernel.Kernel
	var err error
	if b.KernelCache != "" {
		k, err = kernel.OpenCached(b.Kernel, b.KernelCache)
	} else {
		k, err = kernel.Open(b.Kernel)
	}
	if err != nil {
		return err
	}
	optional := append(kernel.Optional(), b.Drivers...)
	modules, absent, err := k.Modules(kernel.Required(), optional)
	if err != nil {
		return err
	}
	b.manifest.KernelRelease, b.manifest.AbsentDrivers = k.Release, absent
	for _, m := range modules {
		b.modules = append(b.modules, initramfs.Module{Name: m.Name, Content: m.Content})
		b.manifest.Modules = append(b.manifest.Modules, m.Name)
	}
	return b.addPart(ctx, dir, Kernel, func(f *os.File) error {
		_, err := f.Write(k.Image)
		return err
	})
}

func (b *builder) addRootfs(ctx context.Context, dir string) error {
	if b.Rootfs == "" {
		b.manifest.Mode = initramfs.ModePID1
		return nil
	}
	c := rootfs.Config{Source: b.Rootfs, Output: filepath.Join(dir, string(Rootfs)), Size: b.Size, Label: "root", Probe: []string{handoverProgram}}
	switch b.Mode {
	case initramfs.ModeHandover:
		c.Programs = []string{handoverProgram}
	case initramfs.ModePID1:
		c.Programs = []string{pid1Program}
	}
	made, err := rootfs.Build(ctx, c)
	if err != nil {
		return err
	}
	if b.manifest.Mode == "" {
		b.manifest.Mode = initramfs.ModePID1
		if len(made.Found) > 0 {
			b.manifest.Mode = initramfs.ModeHandover
		}
	}
	b.manifest.RootDevice = RootDevice
	if err := b.note(ctx, dir, Rootfs); err != nil {
		return err
	}
	return b.noteLayer(ctx, dir)
}

// noteLayer enters what the root file system is as a layer.
func (b *builder) noteLayer(ctx context.Context, dir string) error {
	f, err := os.Open(filepath.Join(dir, string(Rootfs)))
	if err != nil {
		return err
	}
	defer f.Close()
	l, err := layer.OpenRaw(f)
	if err != nil {
		return err
	}
	info := b.manifest.Files[Rootfs]
	info.Checksum, err = l.RawChecksum(ctx)
	b.manifest.Files[Rootfs] = info
	return err
}

// A root file system that lacks the program for its mode is none.
const (
	handoverProgram = "/sbin/init"
	pid1Program     = "/bin/sh"
)

func (b *builder) addInitrd(ctx context.Context, dir string) error {
	agent, err := os.Open(b.Agent)
	if err != nil {
		return err
	}
	defer agent.Close()
	info, err := agent.Stat()
	if err != nil {
		return err
	}
	c := initramfs.Config{
		Agent:   agent,
		Size:    info.Size(),
		Modules: b.modules,
		Files:   b.Files,
		Boot:    initramfs.Boot{Root: b.manifest.RootDevice, Mode: b.manifest.Mode, Hostname: b.Hostname},
	}
	if c.Boot.Root != "" {
		c.Boot.RootType = "ext4"
	}
	return b.addPart(ctx, dir, Initrd, func(f *os.File) error { return initramfs.Write(f, c) })
}

func (b *builder) addPart(ctx context.Context, dir string, part Part, write func(*os.File) error) error {
	if err := publish.File(filepath.Join(dir, string(part)), 0o444, write); err != nil {
		return fmt.Errorf("write %s: %w", part, err)
	}
	return b.note(ctx, dir, part)
}

// note enters a part that is written into the manifest.
func (b *builder) note(ctx context.Context, dir string, part Part) error {
	f, err := os.Open(filepath.Join(dir, string(part)))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Chmod(0o444); err != nil { // an image does not change; disks are written to in layers above it
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	sum, err := digest(ctx, f, info.Size())
	b.manifest.Files[part] = FileInfo{Size: info.Size(), Digest: sum}
	return err
}
