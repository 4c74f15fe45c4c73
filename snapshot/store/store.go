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

// Store is an open store directory. All methods may be called from any
// goroutine until Close.
type Store struct {
	path      string
	root      *os.Root
	images    *folder
	snapshots *folder
	tmp       *folder
	faults    faults
}

// faults lets a test stand between the steps of publishing. before is called
// with what comes next; an error from it is that step's.
type faults interface {
	before(step, file string) error
}

type noFaults struct{}

func (noFaults) before(string, string) error { return nil }

// folder is one directory of the store: by Root for names, which then cannot
// lead out of it, and by descriptor for what Root does not have.
type folder struct {
	*os.Root
	file *os.File
}

func openFolder(parent *os.Root, name string) (*folder, error) {
	root, err := parent.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	file, err := root.Open(".")
	if err != nil {
		root.Close()
		return nil, err
	}
	return &folder{Root: root, file: file}, nil
}

func (f *folder) close() error {
	if f == nil {
		return nil
	}
	return errors.Join(f.file.Close(), f.Root.Close())
}

func (f *folder) fd() int { return int(f.file.Fd()) }

// Open opens the store at root, creating it if it is not there, and removes
// what dead processes left half-made in it.
func Open(root string) (*Store, error) { return open(root, noFaults{}) }

func open(path string, f faults) (*Store, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open store (%s): %w", path, err)
	}
	if err := create(path); err != nil {
		return nil, fmt.Errorf("open store (%s): %w", path, err)
	}
	s := &Store{path: path, faults: f}
	if err := s.openFolders(); err != nil {
		s.Close()
		return nil, fmt.Errorf("open store (%s): %w", path, err)
	}
	if err := s.Sweep(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// create makes the store's directories. What is published later is durable
// only if they are.
func create(path string) error {
	made := false
	for _, dir := range []string{path, filepath.Join(path, "images"), filepath.Join(path, "snapshots"), filepath.Join(path, "tmp")} {
		if _, err := os.Lstat(dir); err == nil {
			continue
		}
		// Guest memory is in here: nobody else's business.
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		made = true
	}
	if !made {
		return nil
	}
	return errors.Join(syncPath(path), syncPath(filepath.Dir(path)))
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (s *Store) openFolders() (err error) {
	if s.root, err = os.OpenRoot(s.path); err != nil {
		return err
	}
	if s.images, err = openFolder(s.root, "images"); err != nil {
		return err
	}
	if s.snapshots, err = openFolder(s.root, "snapshots"); err != nil {
		return err
	}
	s.tmp, err = openFolder(s.root, "tmp")
	return err
}

// Close releases the store's descriptors. Writers must be finished before;
// snapshots that are open go on. Calling it again does nothing.
func (s *Store) Close() error {
	errs := []error{s.images.close(), s.snapshots.close(), s.tmp.close()}
	if s.root != nil {
		errs = append(errs, s.root.Close())
	}
	for i, err := range errs {
		if errors.Is(err, os.ErrClosed) {
			errs[i] = nil
		}
	}
	return errors.Join(errs...)
}

// Path is the store's root directory.
func (s *Store) Path() string { return s.path }

// remove takes a published directory away: out of the listing by one rename,
// then its files. A process that dies in between leaves the rest to Sweep.
func (s *Store) remove(from *folder, name string) error {
	if err := snapshot.CheckName(name); err != nil {
		return err
	}
	trash := snapshot.NewID()
	err := unix.Renameat(from.fd(), name, s.tmp.fd(), trash)
	if errors.Is(err, unix.ENOENT) {
		return ErrNotFound
	}
	if err != nil {
		return os.NewSyscallError("renameat", err)
	}
	return errors.Join(from.file.Sync(), s.tmp.RemoveAll(trash))
}

// names lists the directory's published entries, sorted.
func (f *folder) names() ([]string, error) {
	entries, err := fs.ReadDir(f.FS(), ".")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if snapshot.CheckName(e.Name()) == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
