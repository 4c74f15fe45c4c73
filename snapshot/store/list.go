package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/snapshot"
)

// Info is one entry of a listing: the manifest, or why there is none to show.
type Info struct {
	Name     string
	Manifest *snapshot.Manifest
	Sizes    Sizes
	Err      error // a *CorruptError for a damaged snapshot
}

// Sizes are the space that a snapshot's files occupy, in bytes.
type Sizes struct {
	// Own comes back when the snapshot is removed and nobody uses it.
	Own int64
	// Shared is in files that other snapshots or images have too.
	Shared int64
}

// Total is the space that the snapshot would need alone.
func (s Sizes) Total() int64 { return s.Own + s.Shared }

func (s *Sizes) add(st fs.FileInfo) {
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return
	}
	if occupied := sys.Blocks * 512; sys.Nlink > 1 {
		s.Shared += occupied
	} else {
		s.Own += occupied
	}
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
		info, err := s.Inspect(name)
		if errors.Is(err, ErrNotFound) {
			continue // removed since
		}
		info.Name, info.Err = name, err
		infos = append(infos, info)
	}
	return infos, nil
}

// newestFirst returns the names of all snapshots, the newest first.
func (s *Store) newestFirst() ([]string, error) {
	names, err := s.snapshots.names()
	if err != nil {
		return nil, err
	}
	published := make(map[string]time.Time, len(names))
	for _, name := range names {
		if st, err := s.snapshots.Lstat(name); err == nil { // or it was removed since
			published[name] = st.ModTime()
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return published[b].Compare(published[a]) })
	return names, nil
}

// Names returns the names of all snapshots, sorted, without looking into them.
func (s *Store) Names() ([]string, error) {
	names, err := s.snapshots.names()
	if err != nil {
		return nil, fmt.Errorf("list snapshots (%s): %w", s.path, err)
	}
	return names, nil
}

// Stat returns a snapshot's manifest after the checks that List makes.
func (s *Store) Stat(name string) (*snapshot.Manifest, error) {
	info, err := s.Inspect(name)
	return info.Manifest, err
}

// Inspect returns one entry of the listing. Info.Err is not set: it is the error.
func (s *Store) Inspect(name string) (Info, error) {
	if err := snapshot.CheckName(name); err != nil {
		return Info{}, fmt.Errorf("inspect snapshot (%.200q): %w", name, err)
	}
	dir, err := s.openDir(name)
	if err != nil {
		return Info{}, fmt.Errorf("inspect snapshot (%s): %w", name, err)
	}
	defer dir.Close()
	info := Info{Name: name}
	if err := info.read(dir); err != nil {
		if !s.still(dir, name) {
			err = ErrNotFound
		}
		return Info{}, fmt.Errorf("inspect snapshot: %w", withName(name, err))
	}
	return info, nil
}

// read fills in the manifest, and the sizes of the files that it names.
func (i *Info) read(dir *os.Root) error {
	m, err := readManifest(dir, i.Name)
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	check := func(file string, size int64) error {
		st, err := dir.Lstat(file)
		if err == nil && !st.Mode().IsRegular() {
			err = fmt.Errorf("%w: not a regular file", snapshot.ErrInvalid)
		}
		if err == nil {
			err = checkSize(st.Size(), size)
		}
		if err != nil {
			return fileError(i.Name, file, err)
		}
		if !seen[file] {
			seen[file] = true
			i.Sizes.add(st)
		}
		return nil
	}
	if err := check(m.State.File, m.State.Bytes); err != nil {
		return err
	}
	stacks := [][]snapshot.LayerRef{m.Memory}
	for _, d := range m.Disks {
		stacks = append(stacks, d.Layers)
	}
	for _, stack := range stacks {
		for _, ref := range stack {
			if err := check(ref.File, ref.Bytes); err != nil {
				return err
			}
		}
	}
	i.Manifest = m
	return nil
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
