package store

import (
	"errors"
	"fmt"
	"os"

	"github.com/forkvm/forkvm/snapshot"
)

// Info is one entry of a listing: the manifest, or why there is none to show.
type Info struct {
	Name     string
	Manifest *snapshot.Manifest
	Err      error // a *CorruptError for a damaged snapshot
}

// List returns all snapshots, sorted by name. It reads the manifests and
// compares the files' presence and length with them: a snapshot in which
// something is missing or cut short is listed with Err, not hidden.
func (s *Store) List() ([]Info, error) {
	names, err := s.snapshots.names()
	if err != nil {
		return nil, fmt.Errorf("list snapshots (%s): %w", s.path, err)
	}
	infos := make([]Info, 0, len(names))
	for _, name := range names {
		m, err := s.Stat(name)
		if errors.Is(err, ErrNotFound) {
			continue // removed since
		}
		infos = append(infos, Info{Name: name, Manifest: m, Err: err})
	}
	return infos, nil
}

// Stat returns a snapshot's manifest after the checks that List makes.
func (s *Store) Stat(name string) (*snapshot.Manifest, error) {
	if err := snapshot.CheckName(name); err != nil {
		return nil, fmt.Errorf("inspect snapshot (%.200q): %w", name, err)
	}
	dir, err := s.openDir(name)
	if err != nil {
		return nil, fmt.Errorf("inspect snapshot (%s): %w", name, err)
	}
	defer dir.Close()
	m, err := statSnapshot(dir, name)
	if err != nil {
		if !s.still(dir, name) {
			err = ErrNotFound
		}
		return nil, fmt.Errorf("inspect snapshot: %w", withName(name, err))
	}
	return m, nil
}

func statSnapshot(dir *os.Root, name string) (*snapshot.Manifest, error) {
	m, err := readManifest(dir, name)
	if err != nil {
		return nil, err
	}
	check := func(file string, size int64) error {
		st, err := dir.Lstat(file)
		if err == nil && !st.Mode().IsRegular() {
			err = fmt.Errorf("%w: not a regular file", snapshot.ErrInvalid)
		}
		if err == nil {
			err = checkSize(st.Size(), size)
		}
		if err != nil {
			return fileError(name, file, err)
		}
		return nil
	}
	if err := check(m.State.File, m.State.Bytes); err != nil {
		return nil, err
	}
	stacks := [][]snapshot.LayerRef{m.Memory}
	for _, d := range m.Disks {
		stacks = append(stacks, d.Layers)
	}
	for _, stack := range stacks {
		for _, ref := range stack {
			if err := check(ref.File, ref.Bytes); err != nil {
				return nil, err
			}
		}
	}
	return m, nil
}

// Remove takes a snapshot out of the store, a damaged one too. It refuses
// nothing: machines that run from it have its files open and go on, snapshots
// that share layers have links of their own, and the space comes back when the
// last of them is gone.
func (s *Store) Remove(name string) error {
	if err := s.remove(s.snapshots, name); err != nil {
		return fmt.Errorf("remove snapshot (%.200s): %w", name, err)
	}
	return nil
}
