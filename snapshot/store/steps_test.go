package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// publishStep is publish for stacks that may be merged.
func publishStep(t testing.TB, s *Store, m *machine, name string, lineage []string) Info {
	t.Helper()
	ctx := context.Background()
	w, err := s.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	manifest := snapshot.Manifest{
		ID: snapshot.NewID(), Created: time.Now(),
		Guest: snapshot.Guest{CPUs: 1, MemoryBytes: memoryPages * layer.UnitSize},
		Disks: []snapshot.Disk{{ID: "blk0", Size: diskBlocks * layer.UnitSize}},
	}
	manifest.Descend(lineage)
	manifest.Memory, err = w.AddStack(ctx, "memory", m.memory)
	if err == nil {
		manifest.Disks[0].Layers, err = w.AddStack(ctx, "disk-blk0", m.disk)
	}
	if err == nil {
		_, err = w.AddState(testState())
	}
	if err == nil {
		err = w.Commit(manifest)
	}
	if err != nil {
		t.Fatal(err)
	}
	info, err := s.Inspect(name)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// contents is what a stack reads as.
func contents(t testing.TB, stack []*layer.Layer, units uint64) []byte {
	t.Helper()
	b := make([]byte, units*layer.UnitSize)
	for _, l := range stack {
		for _, e := range l.Extents() {
			if _, err := l.File().ReadAt(b[e.Start*layer.UnitSize:][:e.Count*layer.UnitSize], e.Offset); err != nil {
				t.Fatal(err)
			}
		}
	}
	return b
}

// A machine that takes a snapshot at each of many steps stores at each only what
// is new, and its stacks stay short. Every step holds what the machine held.
func TestStepsCostWhatChanged(t *testing.T) {
	const steps, pages = 40, 5
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	base := publishStep(t, s, m, "base", nil)
	lineage := base.Manifest.Lineage()
	want := map[string][]byte{}
	var own, mergers int64
	for i := range steps {
		if err := m.grow(pages); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("step-%02d", i)
		info := publishStep(t, s, m, name, lineage)
		if info.Manifest.Parent != lineage[0] {
			t.Errorf("%s grew from %s, want %s", name, info.Manifest.Parent, lineage[0])
		}
		lineage = info.Manifest.Lineage()
		if n := len(info.Manifest.Memory); n > 2*layer.MergeWidth {
			t.Errorf("%s has %d memory layers", name, n)
		}
		// Two layers with a header page, index and data each, and the state.
		if limit := int64(2*(pages+2)+1) * layer.UnitSize; info.Sizes.Own > limit {
			mergers++
		}
		own += info.Sizes.Own
		want[name] = contents(t, m.memory, memoryPages)
	}
	if mergers > (steps+1)/layer.MergeWidth {
		t.Errorf("%d of %d steps stored more than their own", mergers, steps)
	}
	t.Logf("%d steps of %d pages and blocks: %d bytes a step", steps, pages, own/steps)
	names := checkStore(t, s)
	if len(names) != steps+1 {
		t.Fatalf("%d snapshots", len(names))
	}
	for name, memory := range want {
		snap, err := s.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(contents(t, snap.Memory, memoryPages), memory) {
			t.Errorf("%s holds something else", name)
		}
		snap.Close()
	}
	// Removing every second one takes nothing away from the others.
	for i := 0; i < steps; i += 2 {
		if err := s.Remove(fmt.Sprintf("step-%02d", i)); err != nil {
			t.Error(err)
		}
	}
	if names := checkStore(t, s); len(names) != 1+steps/2 {
		t.Errorf("%d snapshots are left", len(names))
	}
	// Without the last one the space of what only it had comes back.
	last := fmt.Sprintf("step-%02d", steps-1)
	before := usage(t, s.Path())
	info, err := s.Inspect(last)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(last); err != nil {
		t.Fatal(err)
	}
	if freed := before - usage(t, s.Path()); freed < info.Sizes.Own {
		t.Errorf("removing %s freed %d bytes, it said %d", last, freed, info.Sizes.Own)
	}
}

// Two machines that grew from one snapshot, one of which was restored from it and
// one of which went on, share what they have in common.
func TestStepsOfAClone(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	for range layer.MergeWidth + 3 {
		if err := m.grow(1); err != nil {
			t.Fatal(err)
		}
	}
	publishStep(t, s, m, "trunk", nil)
	snap, err := s.Open("trunk")
	if err != nil {
		t.Fatal(err)
	}
	clone := &machine{memory: snap.Memory, disk: snap.Disks[0].Layers}
	t.Cleanup(clone.close)
	for i, one := range []*machine{m, clone} {
		if err := one.grow(1); err != nil {
			t.Fatal(err)
		}
		info := publishStep(t, s, one, fmt.Sprintf("branch-%d", i), snap.Manifest.Lineage())
		if own := info.Sizes.Own; own > 8*layer.UnitSize {
			t.Errorf("branch %d stored %d bytes for one page and one block", i, own)
		}
	}
	left, err := s.Open("branch-0")
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close()
	right, err := s.Open("branch-1")
	if err != nil {
		t.Fatal(err)
	}
	defer right.Close()
	d, err := Diff(context.Background(), left, right)
	if err != nil {
		t.Fatal(err)
	}
	want := []layer.Range{{Start: 3, Count: 1}} // where grow writes
	if len(d.Memory) != 1 || d.Memory[0] != want[0] || len(d.Disks) != 1 || len(d.Disks[0].Blocks) != 1 {
		t.Errorf("difference %+v", d)
	}
}

// A copy of a layer that is damaged is not taken for the layer.
func TestDamagedCopyIsNotShared(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	info := publishStep(t, s, m, "first", nil)
	damageFile(t, s, "first", info.Manifest.Memory[0].File)
	publishStep(t, s, m, "second", nil)
	snap, err := s.Open("second")
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	if err := snap.Verify(context.Background()); err != nil {
		t.Error(err)
	}
	var damage *CorruptError
	if _, err := s.Open("first"); !errors.As(err, &damage) {
		t.Error(err)
	}
}

// usage is the space of all files below a directory, each counted once.
func usage(t testing.TB, root string) (total int64) {
	t.Helper()
	seen := map[uint64]bool{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if st := inode(t, path); !seen[st.Ino] {
			seen[st.Ino] = true
			total += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return total
}

// damageFile flips a bit in the header of a file of a snapshot.
func damageFile(t testing.TB, s *Store, name, file string) {
	t.Helper()
	path := filepath.Join(s.Path(), "snapshots", name, file)
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], 40); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b[:], 40); err != nil {
		t.Fatal(err)
	}
}
