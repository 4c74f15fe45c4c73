package store

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/forkvm/forkvm/snapshot"
)

// withGuestAgent is the manifest of a published snapshot, as if its guest had a
// guest agent.
func withGuestAgent(t *testing.T, s *Store, name string) *snapshot.Manifest {
	t.Helper()
	m, err := s.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	m.Guest.GuestAgent = true
	return m
}

// wanted opens a working set that must be there to be recorded.
func wanted(t *testing.T, s *Store, m *snapshot.Manifest) *WorkingSet {
	t.Helper()
	w := s.WorkingSet(m)
	if w == nil || !w.Wanted {
		t.Fatalf("got %+v: nobody is asked to record", w)
	}
	return w
}

var someRanges = []snapshot.PageRange{{Start: 2, Count: 3}, {Start: 9, Count: 1}}

// A judging set is a file of its own, which nobody makes who does not want one.
func TestJudgingSet(t *testing.T) {
	s, machine := openStore(t, t.TempDir()), newMachine(t)
	publish(t, s, machine, "base")
	m := withGuestAgent(t, s, "base")
	if w := s.JudgingSet(m, false); w != nil {
		t.Fatalf("got %+v, which nobody wanted", w)
	}
	other := wanted(t, s, m)
	defer other.Close()
	w := s.JudgingSet(m, true)
	if w == nil || !w.Wanted || !w.Late {
		t.Fatalf("got %+v: nobody is asked to record", w)
	}
	defer w.Close()
	if found := s.JudgingSet(m, false); found != nil {
		t.Fatalf("got %+v before it was recorded", found)
	}
	if err := w.Record(snapshot.WorkingSet{RAM: memoryPages, Written: someRanges}); err != nil {
		t.Fatal(err)
	}
	sound := s.JudgingSet(m, false)
	if sound == nil || sound.Wanted || !sound.Late {
		t.Fatalf("got %+v after it was recorded", sound)
	}
	defer sound.Close()
	if got, err := sound.Read(); err != nil || !reflect.DeepEqual(got.Written, someRanges) {
		t.Errorf("got %+v, %v", got, err)
	}
}

// One records, the others see nothing until that is done, and then the set.
func TestWorkingSet(t *testing.T) {
	s, machine := openStore(t, t.TempDir()), newMachine(t)
	publish(t, s, machine, "base")
	m := withGuestAgent(t, s, "base")
	w := wanted(t, s, m)
	if other := s.WorkingSet(m); other != nil {
		t.Fatalf("somebody else got %+v", other)
	}
	if err := w.Record(snapshot.WorkingSet{RAM: memoryPages, Written: someRanges}); err != nil {
		t.Fatal(err)
	}
	sound := s.WorkingSet(m)
	if sound == nil || sound.Wanted {
		t.Fatalf("got %+v after it was recorded", sound)
	}
	defer sound.Close()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if st, err := sound.File.Stat(); err != nil || st.Mode().Perm() != 0o444 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	dup, err := sound.Dup()
	if err != nil {
		t.Fatal(err)
	}
	defer dup.Close()
	want := &snapshot.WorkingSet{Snapshot: m.ID, RAM: memoryPages, Written: someRanges}
	if got, err := dup.Read(); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	// It is no part of the snapshot, and goes with it.
	checkStore(t, s)
	if err := s.Remove("base"); err != nil {
		t.Fatal(err)
	}
	if s.WorkingSet(m) != nil {
		t.Error("a snapshot that was removed has a working set")
	}
}

// Whatever is wrong with the file, it is recorded anew, and by one only.
func TestWorkingSetDamaged(t *testing.T) {
	s, machine := openStore(t, t.TempDir()), newMachine(t)
	publish(t, s, machine, "base")
	m := withGuestAgent(t, s, "base")
	path := filepath.Join(s.Path(), "snapshots", "base", WorkingSetFile)
	set := snapshot.WorkingSet{Snapshot: m.ID, RAM: memoryPages, Written: someRanges}
	good, err := set.Encode()
	if err != nil {
		t.Fatal(err)
	}
	set.Snapshot = snapshot.NewID()
	foreign, err := set.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"empty": nil, "cut": good[:len(good)-1], "zeros": make([]byte, len(good)),
		"of another snapshot": foreign, "huge": make([]byte, 1<<20),
	} {
		os.Remove(path)
		if err := os.WriteFile(path, content, 0o444); err != nil {
			t.Fatal(err)
		}
		w := wanted(t, s, m)
		if err := w.Record(snapshot.WorkingSet{RAM: memoryPages, Written: someRanges}); err != nil {
			t.Fatal(err)
		}
		w.Close()
		got, err := os.ReadFile(path)
		if err != nil || string(got) != string(good) {
			t.Errorf("%s: %d bytes afterwards, %v", name, len(got), err)
		}
	}
	// A recorder that gives up lets the next one try.
	os.Remove(path)
	wanted(t, s, m).Close()
	w := wanted(t, s, m)
	if err := w.Record(snapshot.WorkingSet{RAM: memoryPages, Written: []snapshot.PageRange{{Start: memoryPages, Count: 1}}}); err == nil {
		t.Error("pages outside of RAM were recorded")
	}
	w.Close()
	wanted(t, s, m).Close()
	// A later version's is left alone.
	os.Remove(path)
	later := append([]byte(nil), good...)
	later[8]++
	if err := os.WriteFile(path, later, 0o600); err != nil {
		t.Fatal(err)
	}
	if w = s.WorkingSet(m); w == nil || w.Wanted {
		t.Fatalf("got %+v for a later version", w)
	}
	if _, err := w.Read(); !errors.Is(err, snapshot.ErrVersion) {
		t.Errorf("read of a later version: %v", err)
	}
	w.Close()
}

// No file where none can be: a link, a directory, a guest that nobody hears from.
func TestNoWorkingSet(t *testing.T) {
	s, machine := openStore(t, t.TempDir()), newMachine(t)
	publish(t, s, machine, "base")
	m := withGuestAgent(t, s, "base")
	path := filepath.Join(s.Path(), "snapshots", "base", WorkingSetFile)
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, path); err != nil {
		t.Fatal(err)
	}
	if w := s.WorkingSet(m); w != nil {
		t.Errorf("got %+v through a link", w)
	}
	os.Remove(path)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if w := s.WorkingSet(m); w != nil {
		t.Errorf("got %+v for a directory", w)
	}
	os.Remove(path)
	m.Guest.GuestAgent = false
	if w := s.WorkingSet(m); w != nil {
		t.Errorf("got %+v for a guest without guest agent", w)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("a file was made for it")
	}
}

// Of many who come at once, one is asked.
func TestWorkingSetAtOnce(t *testing.T) {
	s, machine := openStore(t, t.TempDir()), newMachine(t)
	publish(t, s, machine, "base")
	m := withGuestAgent(t, s, "base")
	var asked atomic.Int32
	var all sync.WaitGroup
	sets := make([]*WorkingSet, 20)
	for i := range sets {
		all.Go(func() {
			if sets[i] = s.WorkingSet(m); sets[i] != nil && sets[i].Wanted {
				asked.Add(1)
			}
		})
	}
	all.Wait()
	if n := asked.Load(); n != 1 {
		t.Errorf("%d are asked to record", n)
	}
	for _, w := range sets {
		if w != nil {
			w.Close()
		}
	}
}
