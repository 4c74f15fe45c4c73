package store

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/forkvm/forkvm/snapshot"
)

// PublishImage makes an image directory called name: fill is given an empty
// directory and puts regular files and directories into it; then they are made
// read-only and durable and appear under the name by one rename. If fill or
// anything after it fails, nothing is left. A name that is taken is ErrExists,
// before fill is called if possible.
func (s *Store) PublishImage(name string, fill func(dir string) error) error {
	if err := snapshot.CheckName(name); err != nil {
		return fmt.Errorf("publish image (%.200q): %w", name, err)
	}
	if err := s.publishImage(name, fill); err != nil {
		return fmt.Errorf("publish image (%s): %w", name, err)
	}
	return nil
}

func (s *Store) publishImage(name string, fill func(dir string) error) error {
	if _, err := s.images.Lstat(name); err == nil {
		return ErrExists
	}
	p, err := s.begin()
	if err != nil {
		return err
	}
	err = fill(p.path())
	if err == nil {
		err = p.settle()
	}
	if err != nil {
		return errors.Join(err, p.abort())
	}
	return p.publish(s.images, name)
}

// settle makes all that is in the directory read-only and durable, the
// directories after what is in them.
func (p *pending) settle() error {
	var directories []string
	files := 0
	err := fs.WalkDir(p.FS(), ".", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.IsDir():
			directories = append(directories, path)
			return nil
		case !e.Type().IsRegular():
			return fmt.Errorf("%w: %s is no regular file", snapshot.ErrInvalid, path)
		}
		files++
		return p.settleFile(path)
	})
	if err != nil {
		return err
	}
	if files == 0 {
		return fmt.Errorf("%w: no file in the image", snapshot.ErrInvalid)
	}
	for i := len(directories) - 1; i > 0; i-- { // the first is synced by publish
		if err := p.syncName(directories[i]); err != nil {
			return err
		}
	}
	return nil
}

func (p *pending) settleFile(path string) error {
	if err := p.Chmod(path, 0o444); err != nil {
		return err
	}
	if err := p.store.before("sync", path); err != nil {
		return err
	}
	return p.syncName(path)
}

func (p *pending) syncName(path string) error {
	f, err := p.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Image returns the directory of a published image. Its files do not change;
// hold them open to use them beyond a RemoveImage.
func (s *Store) Image(name string) (string, error) {
	if err := snapshot.CheckName(name); err != nil {
		return "", fmt.Errorf("find image (%.200q): %w", name, err)
	}
	st, err := s.images.Stat(name)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !st.IsDir() {
		err = ErrNotFound
	}
	if err != nil {
		return "", fmt.Errorf("find image (%s): %w", name, err)
	}
	return filepath.Join(s.path, "images", name), nil
}

// Images lists the published images, sorted by name.
func (s *Store) Images() ([]string, error) {
	names, err := s.images.names()
	if err != nil {
		return nil, fmt.Errorf("list images (%s): %w", s.path, err)
	}
	return names, nil
}

// RemoveImage takes an image out of the store. Machines and snapshots that
// use its files keep them.
func (s *Store) RemoveImage(name string) error {
	if err := s.remove(s.images, name); err != nil {
		return fmt.Errorf("remove image (%.200s): %w", name, err)
	}
	return nil
}
