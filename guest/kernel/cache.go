package kernel

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/forkvm/forkvm/guest/internal/publish"
)

// OpenCached is Open for a file that is opened again and again: the first time it unpacks it into a directory below dir, named after the
// file's content. Several processes may do so at once. Whoever owns dir may delete what is in it at any time that no Kernel from
// it is in use.
func OpenCached(path, dir string) (*Kernel, error) {
	k, err := openCached(path, dir)
	if err != nil {
		return nil, fmt.Errorf("open kernel (%s): %w", path, err)
	}
	return k, nil
}

func openCached(path, dir string) (*Kernel, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return open(path)
	}
	key, err := fileKey(path)
	if err != nil {
		return nil, err
	}
	place := filepath.Join(dir, "kernel-"+key)
	if k, err := FromTree(os.DirFS(place)); err == nil {
		return k, nil
	}
	k, err := open(path)
	if err != nil || k.modules.read == nil || k.Release == "" {
		return k, err // a file without modules is read as fast as a copy of it would be
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	err = publish.Directory(place, k.save)
	if err != nil && !errors.Is(err, os.ErrExist) { // another process was faster
		return nil, err
	}
	return k, nil
}

func fileKey(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil))[:32], nil
}

// save writes the kernel as a tree that FromTree takes. Modules stay compressed.
func (k *Kernel) save(dir string) error {
	base := filepath.Join("lib/modules", k.Release)
	contents := map[string][]byte{filepath.Join("boot", "vmlinux-"+k.Release): k.Image}
	for _, name := range k.modules.paths {
		content, err := k.modules.read(name)
		if err != nil {
			return err
		}
		contents[filepath.Join(base, "all", filepath.Base(name))] = content
	}
	var config, builtin []byte
	for name, value := range k.config {
		config = fmt.Appendf(config, "%s=%s\n", name, value)
	}
	for name := range k.builtin {
		builtin = fmt.Appendf(builtin, "%s.ko\n", name)
	}
	if k.config != nil {
		contents[filepath.Join("boot", "config-"+k.Release)] = config
	}
	if k.builtin != nil {
		contents[filepath.Join(base, "modules.builtin")] = builtin
	}
	for name, content := range contents {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
