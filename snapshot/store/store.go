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
	config    Config
}

// Config says where a store is.
type Config struct {
	// Path is the store's directory, which is made if it is not there.
	Path string
	// Before, if set, is called before each step of publishing with what comes
	// next and the file that it is about, if any: "create", "link", "write",
	// "sync", "sync directory", "rename", "sync parent". An error from it is that
	// step's. Tests stand there to let a host fail.
	Before func(step, file string) error
}

// before is called before each step of publishing.
func (s *Store) before(step, file string) error {
	if s.config.Before == nil {
		return nil
	}
	return s.config.Before(step, file)
}

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

// Open is OpenWith for the store at root.
func Open(root string) (*Store, error) { return OpenWith(Config{Path: root}) }

// OpenWith opens a store, creating it if it is not there, and removes what dead
// processes left half-made in it.
func OpenWith(c Config) (*Store, error) {
	path, err := filepath.Abs(c.Path)
	if err != nil {
		return nil, fmt.Errorf("open store (%s): %w", path, err)
	}
	if err := create(path); err != nil {
		return nil, fmt.Errorf("open store (%s): %w", path, err)
	}
	s := &Store{path: path, config: c}
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
