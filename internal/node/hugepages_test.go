package node

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

// openInMemory is open with a run directory in memory, as /run is.
func openInMemory(t *testing.T) *Node {
	t.Helper()
	if !linux.InMemory("/dev/shm") {
		t.Skip("/dev/shm is not in memory")
	}
	dir, err := os.MkdirTemp("/dev/shm", "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n, err := Open(Config{DataDir: filepath.Join(t.TempDir(), "data"), RunDir: dir, Command: []string{os.Args[0]}, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

const hugeTestUnits = 4 * snapshot.HugePageUnits

// cloned is a checkpoint of a snapshot of four huge pages, each page filled with its own
// number, of which a clone has noted that it reads the second and the fourth.
func cloned(t *testing.T, m *snapshot.Manifest) *machine.Checkpoint {
	t.Helper()
	f, err := linux.MemoryFile("layer")
	if err != nil {
		t.Fatal(err)
	}
	for unit := range hugeTestUnits {
		if _, err := f.WriteAt(hugeTestPage(unit), layer.DataOffset+int64(unit)*layer.UnitSize); err != nil {
			t.Fatal(err)
		}
	}
	extents := []layer.Extent{{Count: hugeTestUnits, Offset: layer.DataOffset}}
	l, err := layer.Seal(f, layer.SealOptions{Kind: layer.KindMemory, Units: hugeTestUnits, Extents: extents})
	if err != nil {
		t.Fatal(err)
	}
	hints, err := os.Create(filepath.Join(t.TempDir(), "working-set"))
	if err != nil {
		t.Fatal(err)
	}
	c := &machine.Checkpoint{Memory: []*layer.Layer{l}, WorkingSet: &store.WorkingSet{File: hints, Snapshot: m.ID}}
	t.Cleanup(func() { c.Close() })
	set := snapshot.WorkingSet{RAM: hugeTestUnits, Read: []uint64{snapshot.HugePageUnits, 3 * snapshot.HugePageUnits}}
	if err := c.WorkingSet.Record(set); err != nil {
		t.Fatal(err)
	}
	return c
}

func hugeTestPage(unit int) []byte {
	return bytes.Repeat([]byte{byte(unit), byte(unit >> 8), 0x5a, 1}, layer.UnitSize/4)
}

func someManifest() *snapshot.Manifest {
	return &snapshot.Manifest{ID: snapshot.NewID(), Guest: snapshot.Guest{MemoryBytes: hugeTestUnits * layer.UnitSize}}
}

// What the hint says is made of the layers, once, for clones to read.
func TestHugePagesOfASnapshot(t *testing.T) {
	n, m := openInMemory(t), someManifest()
	h := n.hugePages(m, cloned(t, m))
	if h == nil {
		t.Fatal("there are no huge pages")
	}
	defer h.Close()
	info, err := h.File.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() == snapshot.HugePageOffset(0) {
		t.Skip("this host makes no huge pages")
	}
	page := make([]byte, layer.UnitSize)
	for i, first := range []int{snapshot.HugePageUnits, 3 * snapshot.HugePageUnits} {
		for unit := range snapshot.HugePageUnits {
			if _, err := h.File.ReadAt(page, snapshot.HugePageOffset(i)+int64(unit)*layer.UnitSize); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(page, hugeTestPage(first+unit)) {
				t.Fatalf("unit %d is not that of the layer", first+unit)
			}
		}
	}
	if _, err := h.File.WriteAt(page, 0); err == nil {
		t.Error("a VM process gets a file that it can write to")
	}
	again := n.hugePages(m, cloned(t, m))
	if again == nil {
		t.Fatal("the second time there are none")
	}
	defer again.Close()
	if second, err := again.File.Stat(); err != nil || !os.SameFile(info, second) {
		t.Errorf("they were made twice: %v", err)
	}
	if err := n.dropHuge(m.ID); err != nil {
		t.Fatal(err)
	}
	if err := n.dropHuge(m.ID); err != nil {
		t.Errorf("nothing to drop: %v", err)
	}
	if left := count(t, n.hugeDir()); left != 0 {
		t.Errorf("%d files are left", left)
	}
}

// No hint, another snapshot's pages, a damaged file, somebody who is making them: a
// clone goes without.
func TestNoHugePages(t *testing.T) {
	n, m := openInMemory(t), someManifest()
	none := func(what string, c *machine.Checkpoint) {
		t.Helper()
		if h := n.hugePages(m, c); h != nil {
			h.Close()
			t.Errorf("%s: there are huge pages", what)
		}
	}
	none("no working set", &machine.Checkpoint{})
	wanted := cloned(t, m)
	wanted.WorkingSet.Wanted = true
	none("a working set that is being recorded", wanted)
	nothing := cloned(t, m)
	if err := nothing.WorkingSet.Record(snapshot.WorkingSet{RAM: hugeTestUnits}); err != nil {
		t.Fatal(err)
	}
	none("nothing is read", nothing)
	larger := cloned(t, m)
	if err := larger.WorkingSet.Record(snapshot.WorkingSet{RAM: 2 * hugeTestUnits, Read: []uint64{0}}); err != nil {
		t.Fatal(err)
	}
	none("a working set of another size", larger)

	good := n.hugePages(m, cloned(t, m))
	if good == nil {
		t.Fatal("there are no huge pages")
	}
	good.Close()
	path := filepath.Join(n.hugeDir(), m.ID)
	other := someManifest()
	if err := os.Rename(path, filepath.Join(n.hugeDir(), other.ID)); err != nil {
		t.Fatal(err)
	}
	if h := n.openHuge(other, 1); h != nil {
		h.Close()
		t.Error("another snapshot's pages are taken")
	}
	if err := os.Symlink(filepath.Join(n.hugeDir(), other.ID), path); err != nil {
		t.Fatal(err)
	}
	if h := n.openHuge(m, 1); h != nil {
		h.Close()
		t.Error("pages are taken through a link")
	}
	n.config.RunDir = t.TempDir()
	if !linux.InMemory(n.config.RunDir) {
		none("a run directory on disk", cloned(t, m))
	}
}

// There are huge pages of so many snapshots at most, and the newest ones.
func TestHugePagesAreBounded(t *testing.T) {
	n := openInMemory(t)
	var last string
	if err := os.MkdirAll(n.hugeDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	for range maxHugeFiles { // cost less to make
		if err := os.WriteFile(filepath.Join(n.hugeDir(), snapshot.NewID()), nil, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		m := someManifest()
		h := n.hugePages(m, cloned(t, m))
		if h == nil {
			t.Fatal("there are no huge pages")
		}
		h.Close()
		last = m.ID
	}
	if have := count(t, n.hugeDir()); have != maxHugeFiles {
		t.Errorf("%d files", have)
	}
	if _, err := os.Stat(filepath.Join(n.hugeDir(), last)); err != nil {
		t.Errorf("the newest one: %v", err)
	}
}
