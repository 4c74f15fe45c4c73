// Package initramfs is the guest agent's other life: the first program of the
// guest. From an initramfs that may hold nothing else it loads modules, mounts
// the root file system and then either hands over to the distribution's init,
// leaving a guest agent behind, or goes on as PID 1 itself.
//
// Everything here runs once, as root, as PID 1, and changes the machine that it
// runs on. An error is the end of the guest, so it says what is missing.
package initramfs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// ConfigPath is where the initramfs says what to do.
const ConfigPath = "/etc/forkvm/initramfs.json"

// What happens once the root file system is mounted.
const (
	// ModeHandover leaves a guest agent behind and executes Config.Init.
	ModeHandover = "handover"
	// ModePID1 goes on as PID 1.
	ModePID1 = "pid1"
)

// Config is the content of ConfigPath. Its zero value, and that of a missing
// file, is ModePID1 in the initramfs itself.
type Config struct {
	// Modules are paths in the initramfs, in the order of loading, not
	// compressed.
	Modules []string `json:"modules,omitempty"`
	// Root is the block device of the root file system. Empty: the initramfs
	// itself is the root.
	Root string `json:"root,omitempty"`
	// RootType is its file system type; empty: ext4.
	RootType string `json:"root_type,omitempty"`
	// RootReadOnly mounts it read-only.
	RootReadOnly bool `json:"root_read_only,omitempty"`
	// Mode is one of the Mode words; empty: ModePID1.
	Mode string `json:"mode,omitempty"`
	// Init is what ModeHandover executes; empty: /sbin/init.
	Init string `json:"init,omitempty"`
	// Hostname is set early; a distribution's init may set another.
	Hostname string `json:"hostname,omitempty"`
}

// Load reads the configuration at path.
func Load(path string) (Config, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ParseConfig([]byte("{}"))
	}
	if err != nil {
		return Config{}, err
	}
	c, err := ParseConfig(b)
	if err != nil {
		return Config{}, fmt.Errorf("parse %s: %w", path, err)
	}
	return c, nil
}

// ParseConfig decodes and checks a configuration and fills in what it leaves
// out.
func ParseConfig(b []byte) (Config, error) {
	var c Config
	if err := json.Unmarshal(b, &c); err != nil {
		return Config{}, err
	}
	if c.Mode == "" {
		c.Mode = ModePID1
	}
	if c.RootType == "" {
		c.RootType = "ext4"
	}
	if c.Init == "" {
		c.Init = "/sbin/init"
	}
	return c, c.check()
}

func (c Config) check() error {
	if c.Mode != ModeHandover && c.Mode != ModePID1 {
		return fmt.Errorf("mode %.40q is neither %s nor %s", c.Mode, ModeHandover, ModePID1)
	}
	if c.Mode == ModeHandover && c.Root == "" {
		return errors.New("mode handover needs a root device")
	}
	if len(c.Hostname) > 64 {
		return fmt.Errorf("hostname has %d bytes, at most 64 are allowed", len(c.Hostname))
	}
	paths := append([]string{c.Init}, c.Modules...)
	if c.Root != "" {
		paths = append(paths, c.Root)
	}
	for _, p := range paths {
		if !filepath.IsAbs(p) {
			return fmt.Errorf("path %.200q is not absolute", p)
		}
	}
	return nil
}
