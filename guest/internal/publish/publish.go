// Package publish makes files and directories appear at their place complete, or not at all.
package publish

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// File calls write with a new file and then moves it to path, durably, in place of what was there. After an error nothing is left.
func File(path string, mode os.FileMode, write func(*os.File) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	err = complete(f, mode, write)
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return err
	}
	return Sync(filepath.Dir(path))
}

func complete(f *os.File, mode os.FileMode, write func(*os.File) error) error {
	err := write(f)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Directory calls write with the path of a new, empty directory and then moves it to path, durably. What is at path must be absent or
// an empty directory. The files in it are the caller's to sync. After an error nothing is left.
func Directory(path string, write func(dir string) error) error {
	path = filepath.Clean(path)
	dir, err := os.MkdirTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	err = write(dir)
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err == nil {
		err = Sync(dir)
	}
	if err == nil {
		// os.Rename refuses to replace a directory, an empty one too.
		err = unix.Rename(dir, path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	return Sync(filepath.Dir(path))
}

// Sync makes a directory's entries durable.
func Sync(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return nil
}
