package image

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/guest/kernel"
	"github.com/forkvm/forkvm/guest/rootfs"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// program makes an ELF file with one segment of each type given, whose content is the text.
func program(machine elf.Machine, text []byte, segments ...elf.ProgType) []byte {
	h := elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: 1, Ehsize: 64, Phentsize: 56, Phoff: 64, Phnum: uint16(len(segments))}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	var out bytes.Buffer
	binary.Write(&out, binary.LittleEndian, h)
	at := uint64(64 + 56*len(segments))
	for _, s := range segments {
		binary.Write(&out, binary.LittleEndian, elf.Prog64{Type: uint32(s), Off: at, Filesz: uint64(len(text)), Memsz: uint64(len(text))})
	}
	out.Write(text)
	return out.Bytes()
}

// vmlinux passes for a kernel with all required drivers built in.
func vmlinux() []byte {
	text := []byte("\x04\x00\x00\x00\x04\x00\x00\x00\x12\x00\x00\x00Xen\x00\x01\x00\x00\x00Linux version 6.1.0-test (x) ")
	for _, d := range kernel.Required() {
		text = append(text, d.Marker...)
	}
	return program(elf.EM_X86_64, text, elf.PT_LOAD, elf.PT_NOTE)
}

type sources struct{ dir string }

func newSources(t *testing.T) sources {
	t.Helper()
	s := sources{t.TempDir()}
	s.write(t, "vmlinux", vmlinux())
	s.write(t, "agent", program(elf.EM_X86_64, []byte("agent"), elf.PT_LOAD))
	s.write(t, "dynamic", program(elf.EM_X86_64, []byte("agent"), elf.PT_LOAD, elf.PT_INTERP))
	s.write(t, "arm", program(elf.EM_AARCH64, []byte("agent"), elf.PT_LOAD))
	s.write(t, "script", []byte("#!/bin/sh\n"))
	s.write(t, "system.tar", archive(t, "sbin/init", "bin/sh"))
	s.write(t, "container.tar", archive(t, "bin/sh"))
	s.write(t, "nothing.tar", archive(t, "etc/passwd"))
	return s
}

func (s sources) path(name string) string { return filepath.Join(s.dir, name) }

func (s sources) write(t *testing.T, name string, content []byte) {
	t.Helper()
	if err := os.WriteFile(s.path(name), content, 0o644); err != nil {
		t.Fatal(err)
	}
}

func archive(t *testing.T, programs ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, name := range programs {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func (s sources) config(rootfs string) Config {
	c := Config{Output: s.path("image"), Kernel: s.path("vmlinux"), Agent: s.path("agent"), CreatedAt: time.Unix(1735689600, 0)}
	if rootfs != "" {
		c.Rootfs = s.path(rootfs)
	}
	return c
}

func mustBuild(t *testing.T, c Config) *Image {
	t.Helper()
	i, err := Build(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func TestModeFollowsTheRootFileSystem(t *testing.T) {
	for name, test := range map[string]struct{ rootfs, mode, want, device string }{
		"system":           {"system.tar", "", "handover", "/dev/vda"},
		"system, told":     {"system.tar", "pid1", "pid1", "/dev/vda"},
		"container":        {"container.tar", "", "pid1", "/dev/vda"},
		"initramfs only":   {"", "", "pid1", ""},
		"neither, default": {"nothing.tar", "", "pid1", "/dev/vda"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSources(t)
			c := s.config(test.rootfs)
			c.Mode = test.mode
			i := mustBuild(t, c)
			m := i.Manifest()
			if m.Mode != test.want || m.RootDevice != test.device || i.Has(Rootfs) != (test.device != "") {
				t.Errorf("mode %s, root %q, %v", m.Mode, m.RootDevice, m.Files)
			}
			initrd, err := os.ReadFile(filepath.Join(i.Dir(), string(Initrd)))
			if err != nil || !bytes.Contains(initrd, []byte(`"mode": "`+test.want+`"`)) || !bytes.Contains(initrd, []byte(`"root": "`+test.device+`"`)) {
				t.Errorf("initrd does not say so (%v)", err)
			}
			if err := i.Verify(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestManifestSaysWhatWasBuilt(t *testing.T) {
	s := newSources(t)
	c := s.config("system.tar")
	c.ExtraCommandLine, c.Hostname, c.Size = "debug x=1", "guest", 64<<20
	i := mustBuild(t, c)
	m := i.Manifest()
	if m.KernelRelease != "6.1.0-test" || m.CommandLine != CommandLine+" debug x=1" || m.Hostname != "guest" || !m.CreatedAt.Equal(c.CreatedAt) {
		t.Errorf("%+v", m)
	}
	if m.Files[Rootfs].Size != 64<<20 || m.Files[Kernel].Size != int64(len(vmlinux())) {
		t.Errorf("%+v", m.Files)
	}
	if sum := m.Files[Rootfs].Checksum; sum == "" || sum != layerChecksum(t, i) {
		t.Errorf("checksum of the root file system as a layer: %q", sum)
	}
	if got := slices.Sorted(maps.Keys(m.Files)); !slices.Equal(got, []Part{Initrd, Rootfs, Kernel}) {
		t.Errorf("files %v", got)
	}
}

func layerChecksum(t *testing.T, i *Image) string {
	t.Helper()
	f, err := i.OpenPart(Rootfs)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := layer.OpenRaw(f)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := l.RawChecksum(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

func TestEqualInputGivesAnEqualID(t *testing.T) {
	s := newSources(t)
	c := s.config("system.tar")
	first := mustBuild(t, c)
	c.Output, c.CreatedAt = s.path("second"), time.Time{}
	second := mustBuild(t, c)
	c.Output, c.ExtraCommandLine = s.path("third"), "other"
	third := mustBuild(t, c)
	if first.Manifest().ID != second.Manifest().ID || first.Manifest().ID == third.Manifest().ID {
		t.Errorf("ids %s %s %s", first.Manifest().ID, second.Manifest().ID, third.Manifest().ID)
	}
}

func TestWhatCannotBecomeAnImage(t *testing.T) {
	var agent *AgentError
	var root *rootfs.RootError
	var format *kernel.FormatError
	as := func(target any) func(error) bool {
		return func(err error) bool { return errors.As(err, target) }
	}
	any := func(error) bool { return true }
	for name, test := range map[string]struct {
		change func(*Config, sources)
		want   func(error) bool
	}{
		"agent is a script":     {func(c *Config, s sources) { c.Agent = s.path("script") }, as(&agent)},
		"agent is dynamic":      {func(c *Config, s sources) { c.Agent = s.path("dynamic") }, as(&agent)},
		"agent is for arm":      {func(c *Config, s sources) { c.Agent = s.path("arm") }, as(&agent)},
		"no agent":              {func(c *Config, s sources) { c.Agent = s.path("absent") }, func(err error) bool { return errors.Is(err, os.ErrNotExist) }},
		"kernel is a tar":       {func(c *Config, s sources) { c.Kernel = s.path("system.tar") }, as(&format)},
		"rootfs is a kernel":    {func(c *Config, s sources) { c.Rootfs = s.path("vmlinux") }, as(&root)},
		"no init":               {func(c *Config, s sources) { c.Rootfs, c.Mode = s.path("container.tar"), "handover" }, as(&root)},
		"no shell":              {func(c *Config, s sources) { c.Rootfs, c.Mode = s.path("nothing.tar"), "pid1" }, as(&root)},
		"handover without root": {func(c *Config, s sources) { c.Rootfs, c.Mode = "", "handover" }, any},
		"unknown mode":          {func(c *Config, s sources) { c.Mode = "systemd" }, any},
		"small size":            {func(c *Config, s sources) { c.Size = 4096 }, any},
		"long command line":     {func(c *Config, s sources) { c.ExtraCommandLine = strings.Repeat("x", 3000) }, any},
		"output is not empty":   {func(c *Config, s sources) { c.Output = s.dir }, func(err error) bool { return errors.Is(err, os.ErrExist) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSources(t)
			c := s.config("system.tar")
			test.change(&c, s)
			before, _ := os.ReadDir(s.dir)
			if _, err := Build(context.Background(), c); err == nil || !test.want(err) {
				t.Errorf("got %v", err)
			}
			if after, _ := os.ReadDir(s.dir); len(after) != len(before) {
				t.Errorf("left behind: %v", after)
			}
		})
	}
}

func TestDamagedImagesAreRecognized(t *testing.T) {
	for name, test := range map[string]struct {
		damage func(t *testing.T, dir string)
		late   bool // found by Verify only
	}{
		"no initrd":      {func(t *testing.T, dir string) { os.Remove(filepath.Join(dir, "initrd")) }, false},
		"short kernel":   {func(t *testing.T, dir string) { os.Truncate(filepath.Join(dir, "vmlinux"), 10) }, false},
		"changed disk":   {func(t *testing.T, dir string) { change(t, filepath.Join(dir, "rootfs.ext4"), 1<<20) }, true},
		"changed kernel": {func(t *testing.T, dir string) { change(t, filepath.Join(dir, "vmlinux"), 100) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSources(t)
			mustBuild(t, s.config("system.tar"))
			test.damage(t, s.path("image"))
			i, err := Open(s.path("image"))
			if test.late && err == nil {
				err = i.Verify(context.Background())
			}
			var corrupt *CorruptError
			if !errors.As(err, &corrupt) {
				t.Errorf("got %v", err)
			}
		})
	}
	var none *NotFoundError
	if _, err := Open(t.TempDir()); !errors.As(err, &none) {
		t.Errorf("empty directory: %v", err)
	}
}

func change(t *testing.T, path string, at int64) {
	t.Helper()
	os.Chmod(path, 0o644)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{0x5a}, at); err != nil {
		t.Fatal(err)
	}
}

func TestPartMustBeARegularFile(t *testing.T) {
	s := newSources(t)
	mustBuild(t, s.config(""))
	path := filepath.Join(s.path("image"), "vmlinux")
	os.Rename(path, path+"-moved")
	if err := os.Symlink("vmlinux-moved", path); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(s.path("image")); err == nil {
		t.Error("a link was followed")
	}
}

func goodManifest() map[string]any {
	hash := strings.Repeat("0f", 32)
	info := map[string]any{"size_bytes": 1, "digest": hash}
	return map[string]any{
		"schema": Schema, "id": hash, "created_at": "2025-01-01T00:00:00Z", "command_line": "quiet", "mode": "pid1",
		"files": map[string]any{"vmlinux": info, "initrd": info},
	}
}

func TestManifestIsChecked(t *testing.T) {
	parse := func(m map[string]any) error {
		text, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		_, err = ParseManifest(text)
		return err
	}
	if err := parse(goodManifest()); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(map[string]any){
		"mode":          func(m map[string]any) { m["mode"] = "x" },
		"id":            func(m map[string]any) { m["id"] = "12" },
		"command line":  func(m map[string]any) { m["command_line"] = "a\nb" },
		"unknown field": func(m map[string]any) { m["new"] = 1 },
		"unknown file": func(m map[string]any) {
			m["files"].(map[string]any)["../../etc/passwd"] = m["files"].(map[string]any)["initrd"]
		},
		"no kernel":     func(m map[string]any) { delete(m["files"].(map[string]any), "vmlinux") },
		"root, no disk": func(m map[string]any) { m["root_device"] = "/dev/vda" },
		"size": func(m map[string]any) {
			m["files"].(map[string]any)["initrd"] = map[string]any{"size_bytes": -1, "digest": m["id"]}
		},
		"digest": func(m map[string]any) {
			m["files"].(map[string]any)["initrd"] = map[string]any{"size_bytes": 1, "digest": "x"}
		},
		"layer checksum": func(m map[string]any) {
			m["files"].(map[string]any)["rootfs.ext4"] = map[string]any{"size_bytes": 512, "digest": m["id"], "checksum": "crc32c:0"}
			m["root_device"] = "/dev/vda"
		},
		"initrd as a layer": func(m map[string]any) {
			m["files"].(map[string]any)["initrd"] = map[string]any{"size_bytes": 1, "digest": m["id"], "checksum": "crc32c:01234567"}
		},
	} {
		m := goodManifest()
		change(m)
		if parse(m) == nil {
			t.Errorf("%s: no error", name)
		}
	}
	var version *VersionError
	m := goodManifest()
	m["schema"] = "forkvm/image/v2"
	m["new"] = 1
	if err := parse(m); !errors.As(err, &version) {
		t.Errorf("other version: %v", err)
	}
	if _, err := ParseManifest(bytes.Repeat([]byte(" "), maxManifest+1)); err == nil {
		t.Error("too long: no error")
	}
}

func FuzzParseManifest(f *testing.F) {
	text, _ := json.Marshal(goodManifest())
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := ParseManifest(text)
		if err == nil && m.Schema != Schema {
			t.Errorf("schema %q", m.Schema)
		}
	})
}
