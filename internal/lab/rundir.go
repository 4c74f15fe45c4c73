package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// runDir holds one machine's own files. It is locked while its owner lives, so that whoever comes next recognises what a
// killed owner left, and removes it.
type runDir struct {
	path string
	lock *os.File
}

const (
	runBase   = "run"
	runPrefix = "run-"
)

func newRunDir(c cache) (*runDir, error) {
	base := filepath.Join(c.dir, runBase)
	if err := os.MkdirAll(base, 0o755); err != nil {
		return nil, err
	}
	removeStaleRunDirs(base)
	// Locked before it has its name: under that, an unlocked directory is a dead owner's.
	fresh, err := os.MkdirTemp(base, "new-")
	if err != nil {
		return nil, err
	}
	lock, err := os.Open(fresh)
	if err == nil {
		err = linux.Flock(lock, unix.LOCK_EX)
	}
	path := filepath.Join(base, runPrefix+strings.TrimPrefix(filepath.Base(fresh), "new-"))
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		lock.Close()
		os.Remove(fresh)
		return nil, fmt.Errorf("create directory for a machine: %w", err)
	}
	return &runDir{path, lock}, nil
}

func (d *runDir) remove() error {
	err := os.RemoveAll(d.path)
	d.lock.Close()
	return err
}

// removeStaleRunDirs removes what can be removed; the rest is for the next time.
func removeStaleRunDirs(base string) {
	found, _ := filepath.Glob(filepath.Join(base, runPrefix+"*"))
	for _, path := range found {
		lock, err := os.Open(path)
		if err != nil {
			continue
		}
		if linux.Flock(lock, unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.RemoveAll(path)
		}
		lock.Close()
	}
}
