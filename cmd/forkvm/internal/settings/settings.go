// Package settings decides where forkvm keeps what: a flag wins over an
// environment variable, that over the configuration file, that over the default.
package settings

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/BurntSushi/toml"

	"github.com/forkvm/forkvm/internal/failure"
)

// Environment variables that set what flags set.
const (
	EnvDataDir = "FORKVM_DATA_DIR"
	EnvRunDir  = "FORKVM_RUN_DIR"
	EnvConfig  = "FORKVM_CONFIG"
)

// Settings are the directories of a node. Both are absolute.
type Settings struct {
	// DataDir holds images, snapshots and the disks of running VMs.
	DataDir string
	// RunDir holds what belongs to running VMs and need not survive a reboot.
	RunDir string
}

// Flags are what the command line says; empty members were not given.
type Flags struct{ DataDir, RunDir, Config string }

// User is whom defaults are for.
type User struct {
	UID    int
	Getenv func(string) string
}

// file is the configuration file.
type file struct {
	DataDir string `toml:"data_dir"`
	RunDir  string `toml:"run_dir"`
}

// maxFile bounds the configuration file, in bytes.
const maxFile = 1 << 20

// Resolve returns the settings. It creates nothing, with one exception: the
// directory under /tmp that stands in for a missing XDG_RUNTIME_DIR.
func Resolve(f Flags, u User) (Settings, error) {
	var s Settings
	c, err := readConfig(f, u)
	if err != nil {
		return s, err
	}
	s.DataDir = first(f.DataDir, u.Getenv(EnvDataDir), c.DataDir)
	s.RunDir = first(f.RunDir, u.Getenv(EnvRunDir), c.RunDir)
	if s.DataDir == "" {
		if s.DataDir, err = u.defaultDataDir(); err != nil {
			return s, err
		}
	}
	if s.RunDir == "" {
		if s.RunDir, err = u.defaultRunDir(); err != nil {
			return s, err
		}
	}
	for _, dir := range []*string{&s.DataDir, &s.RunDir} {
		if *dir, err = filepath.Abs(*dir); err != nil {
			return s, failure.As(failure.Internal, err)
		}
	}
	return s, nil
}

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

// readConfig reads the configuration file. One that was asked for must exist; the
// default one need not.
func readConfig(f Flags, u User) (file, error) {
	path, asked := first(f.Config, u.Getenv(EnvConfig)), true
	if path == "" {
		path, asked = u.defaultConfig(), false
	}
	if path == "" {
		return file{}, nil
	}
	r, err := os.Open(path)
	if err != nil {
		if !asked && errors.Is(err, fs.ErrNotExist) {
			return file{}, nil
		}
		return file{}, failure.As(failure.InvalidArgument, fmt.Errorf("read configuration: %w", err))
	}
	defer r.Close()
	c, err := parse(r)
	if err != nil {
		return file{}, failure.New(failure.InvalidArgument, "read configuration (%s): %w", path, err)
	}
	return c, nil
}

// parse reads the configuration. A key that is not known is an error: it was
// meant to change something and would not.
func parse(r io.Reader) (file, error) {
	var c file
	meta, err := toml.NewDecoder(io.LimitReader(r, maxFile)).Decode(&c)
	if err != nil {
		return file{}, err
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return file{}, fmt.Errorf("key %q is not known", unknown[0].String())
	}
	for key, dir := range map[string]string{"data_dir": c.DataDir, "run_dir": c.RunDir} {
		if dir != "" && !filepath.IsAbs(dir) {
			return file{}, fmt.Errorf("%s: %q is not an absolute path", key, dir)
		}
	}
	return c, nil
}

func (u User) defaultConfig() string {
	if u.UID == 0 {
		return "/etc/forkvm/config.toml"
	}
	if dir := u.xdg("XDG_CONFIG_HOME", ".config"); dir != "" {
		return filepath.Join(dir, "forkvm", "config.toml")
	}
	return ""
}

func (u User) defaultDataDir() (string, error) {
	if u.UID == 0 {
		return "/var/lib/forkvm", nil
	}
	if dir := u.xdg("XDG_DATA_HOME", ".local/share"); dir != "" {
		return filepath.Join(dir, "forkvm"), nil
	}
	return "", failure.New(failure.InvalidArgument, "no data directory: neither XDG_DATA_HOME nor HOME is set; give --data-dir")
}

// defaultRunDir falls back to a directory under /tmp where no session manager
// has made one for the user, as in containers and over su.
func (u User) defaultRunDir() (string, error) {
	if u.UID == 0 {
		return "/run/forkvm", nil
	}
	if dir := u.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "forkvm"), nil
	}
	dir := filepath.Join("/tmp", "forkvm-"+strconv.Itoa(u.UID))
	if err := privateDir(dir, u.UID); err != nil {
		return "", failure.As(failure.NoPermission, fmt.Errorf("no XDG_RUNTIME_DIR, and: %w; give --run-dir", err))
	}
	return dir, nil
}

// privateDir makes sure that dir is a directory that nobody else can change:
// everybody may create names in /tmp.
func privateDir(dir string, uid int) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(st.Uid) != uid || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s is not a directory of user %d alone", dir, uid)
	}
	return nil
}

// xdg returns a directory of the XDG base directory specification; relative
// paths in its variables are to be ignored.
func (u User) xdg(variable, below string) string {
	if dir := u.Getenv(variable); filepath.IsAbs(dir) {
		return dir
	}
	if home := u.Getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, filepath.FromSlash(strings.TrimPrefix(below, "/")))
	}
	return ""
}
