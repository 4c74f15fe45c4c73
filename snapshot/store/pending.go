package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// pending is a directory under tmp that is going to be published. While its
// maker lives it holds a lock on it; the kernel drops the lock with the
// process, whatever ends it, and then Sweep may remove the directory.
type pending struct {
	store *Store
	name  string
	*folder
}

// begin makes an empty pending directory.
func (s *Store) begin() (*pending, error) {
	if err := s.before("create", ""); err != nil {
		return nil, err
	}
	// A sweep may find the directory before it is locked: then another one.
	for range 100 {
		name := snapshot.NewID()
		if err := s.tmp.Mkdir(name, 0o700); err != nil {
			return nil, err
		}
		folder, err := openFolder(s.tmp.Root, name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, errors.Join(err, s.tmp.RemoveAll(name))
		}
		if folder.lock() {
			return &pending{store: s, name: name, folder: folder}, nil
		}
		folder.close()
	}
	return nil, errors.New("directory is removed as fast as it is made")
}

// lock reports whether the directory is now ours and still there.
func (f *folder) lock() bool {
	if err := unix.Flock(f.fd(), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return false
	}
	var st unix.Stat_t
	return unix.Fstat(f.fd(), &st) == nil && st.Nlink > 0
}

// Sweep removes what processes that are dead now left half-made or
// half-removed. Open calls it; a program that keeps a store open for long may
// call it now and then.
func (s *Store) Sweep() error {
	entries, err := fs.ReadDir(s.tmp.FS(), ".")
	if err != nil {
		return fmt.Errorf("sweep store (%s): %w", s.path, err)
	}
	var errs []error
	for _, e := range entries {
		if err := s.sweepOne(e); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("sweep store (%s): %w", s.path, err))
		}
	}
	return errors.Join(errs...)
}

func (s *Store) sweepOne(e fs.DirEntry) error {
	if !e.IsDir() {
		return s.tmp.Remove(e.Name())
	}
	d, err := s.tmp.Open(e.Name())
	if err != nil {
		return err
	}
	// The lock is held until the directory is gone, see begin.
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil // its maker lives
	}
	return s.tmp.RemoveAll(e.Name())
}

// abort removes the directory.
func (p *pending) abort() error {
	return errors.Join(p.store.tmp.RemoveAll(p.name), p.close())
}

// path is the directory's, for programs that fill it.
func (p *pending) path() string { return filepath.Join(p.store.path, "tmp", p.name) }

// create makes a file, lets write fill it, and makes it read-only and durable.
// After an error there is no file.
func (p *pending) create(name string, write func(f *os.File) error) error {
	if err := p.store.before("write", name); err != nil {
		return err
	}
	f, err := p.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Chmod(0o444)
	}
	if err == nil {
		err = p.store.before("sync", name)
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err != nil {
		// So that the caller may try again, with space or another context.
		err = errors.Join(err, p.Remove(name))
	}
	return err
}

// publish makes the directory appear as name in folder. All files in it are
// durable already. Afterwards, or after an error, the directory is no longer
// pending.
func (p *pending) publish(to *folder, name string) error {
	if err := p.rename(to, name); err != nil {
		return errors.Join(err, p.abort())
	}
	return p.close()
}

func (p *pending) rename(to *folder, name string) error {
	if err := p.store.before("sync directory", ""); err != nil {
		return err
	}
	if err := p.file.Sync(); err != nil {
		return err
	}
	if err := p.store.before("rename", ""); err != nil {
		return err
	}
	if err := renameNew(p.store.tmp.fd(), p.name, to.fd(), name); err != nil {
		return err
	}
	err := p.store.before("sync parent", "")
	if err == nil {
		err = to.file.Sync()
	}
	if err != nil {
		// Listed, but perhaps not after a power cut: the caller is told that
		// it failed, so it must not be listed.
		return errors.Join(err, unix.Renameat(to.fd(), name, p.store.tmp.fd(), p.name))
	}
	return nil
}

// renameNew renames a directory unless the new name is taken.
func renameNew(oldDir int, oldName string, newDir int, newName string) error {
	err := unix.Renameat2(oldDir, oldName, newDir, newName, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		// A plain rename replaces an empty directory at most, and nothing
		// that was published is empty.
		err = unix.Renameat(oldDir, oldName, newDir, newName)
	}
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.ENOTDIR) {
		return ErrExists
	}
	return os.NewSyscallError("renameat2", err)
}
