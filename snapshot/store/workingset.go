package store

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
)

// WorkingSetFile is the working set's name in a snapshot's directory. The manifest
// does not name it: it is no part of the snapshot, may be missing, and comes into
// being when the snapshot is used.
const WorkingSetFile = "working-set"

// JudgingSetFile is another working set, of clones in which is judged: to their end, and
// not until they are ready.
const JudgingSetFile = "judging-set"

// WorkingSet is one of these files of a snapshot, open. Its bytes are a hint from
// whoever used the snapshot first.
type WorkingSet struct {
	File     *os.File
	Snapshot string // its id
	// Late: it is of all that a clone does, and not of what it does until it is ready.
	Late bool
	// Wanted: there is no sound working set yet, and whoever has the file is the only
	// one who may record one. The file is locked as long as somebody has it open.
	Wanted bool
}

// WorkingSet opens the working set of a snapshot, or makes an empty file for the
// caller to record one. It returns nil if there is neither: somebody else is
// recording, or the store cannot be written. Never is that a reason not to use
// the snapshot.
func (s *Store) WorkingSet(m *snapshot.Manifest) *WorkingSet {
	return s.openWorkingSet(m, WorkingSetFile, true)
}

// JudgingSet is WorkingSet for a clone in which is judged. No file is made unless one is
// wanted.
func (s *Store) JudgingSet(m *snapshot.Manifest, wanted bool) *WorkingSet {
	w := s.openWorkingSet(m, JudgingSetFile, wanted)
	if w != nil {
		w.Late = true
	}
	return w
}

func (s *Store) openWorkingSet(m *snapshot.Manifest, name string, wanted bool) *WorkingSet {
	if !m.Guest.GuestAgent {
		return nil // nobody can tell when such a guest is ready
	}
	path := m.Name + "/" + name
	f, err := s.snapshots.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	switch {
	case err == nil:
		if sound(f, m) {
			return &WorkingSet{File: f, Snapshot: m.ID}
		}
		retired := wanted && s.retire(f, path)
		f.Close()
		if !retired {
			return nil
		}
	case !wanted || !errors.Is(err, fs.ErrNotExist):
		return nil
	}
	// Nobody can open it for writing a second time.
	f, err = s.snapshots.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return nil
	}
	// Before it was locked another may have taken it for one that was left.
	if !s.locked(f, path) {
		f.Close()
		return nil
	}
	return &WorkingSet{File: f, Snapshot: m.ID, Wanted: true}
}

// retire removes a file that is not sound, unless somebody is recording it.
func (s *Store) retire(f *os.File, path string) bool {
	return s.locked(f, path) && s.snapshots.Remove(path) == nil
}

// locked locks an open file, and reports whether it is the one at the path then.
func (s *Store) locked(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil || !opened.Mode().IsRegular() || !lockFile(f) {
		return false
	}
	there, err := s.snapshots.Lstat(path)
	return err == nil && os.SameFile(opened, there)
}

func lockFile(f *os.File) bool {
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}

// sound reports whether a file is a working set of the snapshot, or one of a
// later version, which is left alone.
func sound(f *os.File, m *snapshot.Manifest) bool {
	w, err := readWorkingSet(f)
	if err != nil {
		return errors.Is(err, snapshot.ErrVersion)
	}
	return w.Snapshot == m.ID
}

func readWorkingSet(f *os.File) (*snapshot.WorkingSet, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > snapshot.MaxWorkingSetSize {
		return nil, snapshot.ErrTooLarge
	}
	b := make([]byte, st.Size())
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return snapshot.DecodeWorkingSet(b)
}

// Close closes the file.
func (w *WorkingSet) Close() error { return w.File.Close() }

// Dup returns the working set with a handle of its own, for use and not to be
// recorded.
func (w *WorkingSet) Dup() (*WorkingSet, error) {
	f, err := linux.Duplicate(w.File)
	if err != nil {
		return nil, err
	}
	return &WorkingSet{File: f, Snapshot: w.Snapshot, Late: w.Late}, nil
}

// Read reads and checks the set.
func (w *WorkingSet) Read() (*snapshot.WorkingSet, error) { return readWorkingSet(w.File) }

// Record writes what a clone has used into a file that wants to know. Until all is
// there the file is not sound.
func (w *WorkingSet) Record(set snapshot.WorkingSet) error {
	set.Snapshot = w.Snapshot
	b, err := set.Encode()
	if err != nil {
		return err
	}
	if err := w.File.Truncate(int64(len(b))); err != nil {
		return err
	}
	_, err = w.File.WriteAt(b, 0)
	return err
}
