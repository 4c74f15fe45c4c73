package archive

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

const units = 4096 // 16 MiB of memory and of disk

func openStore(t testing.TB, path string) *store.Store {
	t.Helper()
	st, err := store.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
}

// source makes snapshots of content that a seed decides.
type source struct {
	t    testing.TB
	st   *store.Store
	rand *rand.Rand
}

func newSource(t testing.TB, seed uint64) *source {
	return &source{t: t, st: openStore(t, t.TempDir()), rand: rand.New(rand.NewPCG(seed, 0))}
}

// layer makes one of count units in runs, with content that compresses a little.
func (s *source) layer(kind layer.Kind, count uint64) *layer.Layer {
	s.t.Helper()
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC)
	if err != nil {
		s.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "layer")
	var extents []layer.Extent
	at, unit := int64(layer.DataOffset), uint64(0)
	for count > 0 {
		unit += 1 + s.rand.Uint64N(3)
		n := min(count, 1+s.rand.Uint64N(40))
		extents = append(extents, layer.Extent{Start: unit, Count: n, Offset: at})
		for range n {
			page := make([]byte, layer.UnitSize)
			for i := range layer.UnitSize / 2 {
				page[i] = byte(s.rand.Uint32())
			}
			if _, err := f.WriteAt(page, at); err != nil {
				s.t.Fatal(err)
			}
			at += layer.UnitSize
		}
		unit += n
		count -= n
	}
	l, err := layer.Seal(f, layer.SealOptions{Kind: kind, Units: units, Extents: extents, ID: s.id()})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { l.Close() })
	return l
}

func (s *source) id() string { return fmt.Sprintf("%016x%016x", s.rand.Uint64(), s.rand.Uint64()) }

// publish stores a snapshot of the layers and opens it.
func (s *source) publish(name string, memory, disk []*layer.Layer) *store.Snapshot {
	s.t.Helper()
	w, err := s.st.Create(name)
	if err != nil {
		s.t.Fatal(err)
	}
	defer w.Abort()
	m := snapshot.Manifest{
		ID: s.id(), Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Guest: snapshot.Guest{CPUs: 1, MemoryBytes: units * layer.UnitSize},
		Disks: []snapshot.Disk{{ID: "root", Size: units * layer.UnitSize}},
	}
	ctx := context.Background()
	m.Memory, err = w.AddStack(ctx, "memory", memory)
	if err == nil {
		m.Disks[0].Layers, err = w.AddStack(ctx, "disk-root", disk)
	}
	if err == nil {
		_, err = w.AddState(&snapshot.State{Sections: []snapshot.Section{{ID: "vm", Data: []byte("state of " + name)}}})
	}
	if err == nil {
		err = w.Commit(m)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return s.open(name)
}

func (s *source) open(name string) *store.Snapshot {
	s.t.Helper()
	snap, err := s.st.Open(name)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { snap.Close() })
	return snap
}

// raw is a sparse image with some data in the middle and at its odd end.
func (s *source) raw() *layer.Layer {
	s.t.Helper()
	path := filepath.Join(s.t.TempDir(), "image")
	data := make([]byte, 600<<10)
	for i := range data {
		data[i] = byte(s.rand.Uint32())
	}
	err := os.WriteFile(path, nil, 0o600)
	if err == nil {
		err = os.Truncate(path, 8<<20+512)
	}
	f, openErr := os.OpenFile(path, os.O_RDWR, 0)
	if err = errors.Join(err, openErr); err != nil {
		s.t.Fatal(err)
	}
	_, err = f.WriteAt(data, 3<<20+1000)
	_, endErr := f.WriteAt([]byte("the end"), 8<<20+505)
	if err = errors.Join(err, endErr, f.Chmod(0o444)); err != nil {
		s.t.Fatal(err)
	}
	l, err := layer.OpenRaw(f)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { l.Close() })
	return l
}

// same compares two snapshots file by file.
func same(t testing.TB, a, b *store.Store, nameA, nameB string) {
	t.Helper()
	files := map[string][sha256.Size]byte{}
	for i, dir := range []string{filepath.Join(a.Path(), "snapshots", nameA), filepath.Join(b.Path(), "snapshots", nameB)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.Name() == snapshot.ManifestFile && nameA != nameB {
				continue
			}
			b, err := os.ReadFile(filepath.Join(dir, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				files[e.Name()] = sha256.Sum256(b)
			} else if files[e.Name()] != sha256.Sum256(b) {
				t.Errorf("file %s differs", e.Name())
			}
		}
	}
}

func openArchive(t testing.TB) *Directory {
	t.Helper()
	d, err := MakeDirectory(filepath.Join(t.TempDir(), "archive"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}
