package memory

import (
	"bytes"
	"os"
	"testing"

	"github.com/forkvm/forkvm/internal/linux"
)

// scattered is a layer of n single pages, every step-th one, whose extents could
// not be mapped one by one.
func scattered(t testing.TB, n, step int) Layer {
	t.Helper()
	f, err := linux.MemoryFile("scattered")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	truncate(t, f, int64(n)*PageSize)
	l := Layer{File: f}
	for i := range n {
		if _, err := f.WriteAt([]byte{byte(i), byte(i >> 8), byte(i >> 16), 1}, int64(i)*PageSize); err != nil {
			t.Fatal(err)
		}
		// In the file the pages lie the other way round, so that no two extents
		// continue each other.
		l.Extents = append(l.Extents, Extent{Start: uint64(i * step), Count: 1, Offset: int64(n-1-i) * PageSize})
	}
	return l
}

// A layer of a hundred thousand single pages is mapped within the budget, has the
// right contents, leaves nothing private to be scanned and compared, and freezes
// and stacks of layers work on top of it.
func TestFragmentedLayer(t *testing.T) {
	const n, step = 100_000, 2
	layer := scattered(t, n, step)
	m := newMemory(t, Config{Size: 1 << 30, Layers: []Layer{layer}})
	if got := kernelMappings(t, m); got > DefaultMappings {
		t.Fatalf("the kernel has %d mappings of the RAM, the budget is %d", got, DefaultMappings)
	}
	wantPrivate(t, m)
	check := func(m *Memory, i int) {
		t.Helper()
		got := make([]byte, 2*PageSize)
		if err := m.ReadAt(got, uint64(i*step)*PageSize); err != nil {
			t.Fatal(err)
		}
		j := n - 1 - i
		want := make([]byte, 2*PageSize)
		copy(want, []byte{byte(j), byte(j >> 8), byte(j >> 16), 1})
		if !bytes.Equal(got, want) {
			t.Fatalf("page %d starts with %x, want %x", i*step, got[:4], want[:4])
		}
	}
	for i := 0; i < n; i += 97 {
		check(m, i)
	}
	layers := []Layer{layer}
	for generation := range 50 {
		for i := range 100 {
			write(t, m, uint64((i*1999+generation*31)%(n*step)|1)*PageSize, []byte{byte(generation) + 1})
		}
		layers = append(layers, freeze(t, m))
		if got := kernelMappings(t, m); got > DefaultMappings {
			t.Fatalf("%d mappings after %d freezes", got, generation+1)
		}
		wantPrivate(t, m)
	}
	child := newMemory(t, Config{Size: 1 << 30, Layers: layers})
	wantPrivate(t, child)
	for page := uint64(0); page < n*step; page += 61 {
		var ours, theirs [PageSize]byte
		m.ReadAt(ours[:], page*PageSize)
		child.ReadAt(theirs[:], page*PageSize)
		if ours != theirs {
			t.Fatalf("page %d differs in a child", page)
		}
	}
}

// The kernel's limit is that of the process: several fragmented memories share it,
// and leave room for what else the process maps.
func TestManyFragmentedMemories(t *testing.T) {
	const n = 20_000
	layer := scattered(t, n, 3)
	var all []*Memory
	for range 12 {
		m := newMemory(t, Config{Size: 256 << 20, Layers: []Layer{layer}})
		all = append(all, m)
		free, err := linux.FreeMappings()
		if err != nil {
			t.Fatal(err)
		}
		if free < spareMappings/2 {
			t.Fatalf("%d memories leave %d mappings", len(all), free)
		}
	}
	want := dump(t, all[0])
	wantContents(t, all[len(all)-1], want)
}

// Hundreds of freezes leave neither descriptors nor mappings behind, whether the
// guest writes the same pages or others.
func TestFreezeHundreds(t *testing.T) {
	m := newMemory(t, Config{Size: 64 << 20})
	want := make([]byte, 64<<20)
	descriptors, mappings := 0, 0
	for generation := range 300 {
		for i := range 40 {
			for _, page := range []int{i * 3, (i*131 + generation*17) % (len(want) / PageSize)} {
				write(t, m, uint64(page)*PageSize, []byte{byte(generation) + 1})
				want[page*PageSize] = byte(generation) + 1
			}
		}
		l, err := m.Freeze()
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if generation == 50 {
			descriptors, mappings = openDescriptors(t), len(m.mapped)
		}
	}
	if n := openDescriptors(t); n > descriptors+2*maxKeptLayers {
		t.Errorf("%d descriptors after 50 freezes, %d after 300", descriptors, n)
	}
	if n := len(m.mapped); n > m.budget {
		t.Errorf("%d mappings after 50 freezes, %d after 300", mappings, n)
	}
	if maps, err := os.ReadFile("/proc/self/maps"); err != nil || bytes.Count(maps, []byte("memfd:memory-layer")) > 2*maxKeptLayers {
		t.Errorf("%d mappings hold layers (%v)", bytes.Count(maps, []byte("memfd:memory-layer")), err)
	}
	if kept := m.copied.count(); kept > 4*maxKeptPages {
		t.Errorf("%d pages are kept twice", kept)
	}
	wantContents(t, m, want)
}

func BenchmarkNewFragmented(b *testing.B) {
	layer := scattered(b, 100_000, 2)
	for b.Loop() {
		m, err := New(Config{Size: 1 << 30, Layers: []Layer{layer}})
		if err != nil {
			b.Fatal(err)
		}
		m.Close()
	}
}
