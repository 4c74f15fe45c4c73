// Package initramfs makes the archive that the kernel unpacks into memory and starts its first program from: the guest agent as /init, the
// modules that it loads, and a file that tells it what to do then.
package initramfs

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// ConfigPath is where the guest agent looks for Boot.
const ConfigPath = "/etc/forkvm/initramfs.json"

// What the guest agent does once the root file system is mounted.
const (
	ModeHandover = "handover" // it starts the distribution's init and stays as a service
	ModePID1     = "pid1"     // it stays the first process
)

// Boot is what the guest agent is told, as JSON at ConfigPath. Modules are filled in by Write.
type Boot struct {
	Modules  []string `json:"modules"`             // paths in the archive, in the order of loading
	Root     string   `json:"root"`                // block device of the root file system; empty: the archive itself is the root
	RootType string   `json:"root_type,omitempty"` // of file system
	Mode     string   `json:"mode"`
	Hostname string   `json:"hostname,omitempty"`
}

// Module is a module to load, uncompressed.
type Module struct {
	Name    string
	Content []byte
}

// File is anything else to put into the archive.
type File struct {
	Path    string      // absolute
	Mode    os.FileMode // permissions; counts for content only
	Content []byte
	Target  string // if not empty, the file is a symbolic link to this
}

// Config is what Write puts together.
type Config struct {
	Agent   io.Reader // the guest agent's program
	Size    int64     // its length in bytes
	Modules []Module
	Boot    Boot
	Files   []File
}

// fixed is what every archive has: the places where the first program mounts things, and the devices that the kernel itself opens for it.
var fixed = []cpioEntry{
	{name: "dev", mode: typeDirectory | 0o755},
	{name: "proc", mode: typeDirectory | 0o555},
	{name: "run", mode: typeDirectory | 0o755},
	{name: "sys", mode: typeDirectory | 0o555},
	{name: "tmp", mode: typeDirectory | 0o1777},
	{name: "dev/console", mode: typeCharacter | 0o600, major: 5, minor: 1},
	{name: "dev/null", mode: typeCharacter | 0o666, major: 1, minor: 3},
}

// Write writes the archive, not compressed: the kernel then unpacks it by copying. Equal input gives equal bytes.
func Write(w io.Writer, c Config) error {
	if err := write(w, c); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}

func write(w io.Writer, c Config) error {
	if err := c.check(); err != nil {
		return err
	}
	a := newArchive(w)
	for _, e := range fixed {
		if err := a.add(e); err != nil {
			return err
		}
	}
	if err := a.add(cpioEntry{name: "init", mode: typeRegular | 0o755, size: c.Size, content: c.Agent}); err != nil {
		return err
	}
	boot := c.Boot
	boot.Modules = []string{}
	for _, m := range c.Modules {
		name := "lib/modules/" + m.Name + ".ko"
		boot.Modules = append(boot.Modules, "/"+name)
		if err := a.add(content(name, 0o644, m.Content)); err != nil {
			return err
		}
	}
	text, err := json.MarshalIndent(boot, "", "  ")
	if err != nil {
		return err
	}
	if err := a.add(content(ConfigPath[1:], 0o644, append(text, '\n'))); err != nil {
		return err
	}
	if err := addFiles(a, c.Files); err != nil {
		return err
	}
	return a.close()
}

func (c Config) check() error {
	if c.Boot.Mode != ModeHandover && c.Boot.Mode != ModePID1 {
		return fmt.Errorf("mode %q is neither %s nor %s", c.Boot.Mode, ModeHandover, ModePID1)
	}
	if c.Boot.Mode == ModeHandover && c.Boot.Root == "" {
		return fmt.Errorf("mode %s needs a root file system", ModeHandover)
	}
	for _, m := range c.Modules {
		if m.Name == "" || strings.ContainsAny(m.Name, "/\x00") {
			return fmt.Errorf("module name %q is not possible", m.Name)
		}
	}
	return nil
}

// addFiles writes them in the order of their paths.
func addFiles(a *archive, files []File) error {
	sorted := slices.Clone(files)
	slices.SortFunc(sorted, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	for _, f := range sorted {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || f.Path == "/" {
			return fmt.Errorf("file name %q is not a clean absolute path", f.Path)
		}
		e := content(f.Path[1:], uint32(f.Mode.Perm()), f.Content)
		if f.Target != "" {
			e = content(f.Path[1:], 0o777, []byte(f.Target))
			e.mode = typeSymlink | 0o777
		}
		if err := a.add(e); err != nil {
			return err
		}
	}
	return nil
}

func content(name string, mode uint32, p []byte) cpioEntry {
	return cpioEntry{name: name, mode: typeRegular | mode, size: int64(len(p)), content: bytes.NewReader(p)}
}
