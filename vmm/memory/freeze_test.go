package memory

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestFreezeSharesWithChildren(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		parent := newMemory(t, Config{Size: testSize})
		parent.scan = s
		write(t, parent, 5*PageSize+100, []byte("parent"))
		wantPrivate(t, parent, 5)
		layer := freeze(t, parent)
		wantPrivate(t, parent)
		if want := []Extent{{Start: 5, Count: 1, Offset: DataStart}}; !slices.Equal(layer.Extents, want) {
			t.Fatalf("extents %+v, want %+v", layer.Extents, want)
		}
		child := newMemory(t, Config{Size: testSize, Layers: []Layer{layer}})
		child.scan = s
		write(t, child, 5*PageSize+100, []byte("child!"))
		write(t, parent, 6*PageSize, []byte("more"))
		for m, want := range map[*Memory]string{parent: "parent", child: "child!"} {
			got := make([]byte, 6)
			m.ReadAt(got, 5*PageSize+100)
			if string(got) != want {
				t.Errorf("read %q, want %q", got, want)
			}
		}
		wantPrivate(t, parent, 6)
		wantPrivate(t, child, 5)
	})
}

// Pages of zeros are stored only where they hide something, and then as nothing
// but the fact.
func TestFreezeZeros(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		m := newMemory(t, Config{Size: testSize, Layers: []Layer{
			{File: patternFile(t, 4, 1), Extents: []Extent{{Start: 0, Count: 4}}}}})
		m.scan = s
		var zeros [PageSize]byte
		write(t, m, 1*PageSize, zeros[:]) // over data
		write(t, m, 2*PageSize, zeros[:])
		write(t, m, 6*PageSize, zeros[:]) // over nothing
		write(t, m, 8*PageSize, []byte{1})
		wantPrivate(t, m, 1, 2, 6, 8)
		want := []Extent{{Start: 1, Count: 2, Offset: ZeroExtent}, {Start: 8, Count: 1, Offset: DataStart}}
		layer := freeze(t, m)
		if !slices.Equal(layer.Extents, want) {
			t.Errorf("extents %+v, want %+v", layer.Extents, want)
		}
		if info, _ := layer.File.Stat(); info.Size() != DataStart+PageSize {
			t.Errorf("file has %d bytes", info.Size())
		}
		wantPrivate(t, m) // the zeros over nothing were given back
		if again := freeze(t, m); len(again.Extents) != 0 {
			t.Errorf("nothing was written, but the next layer has %+v", again.Extents)
		}
	})
}

func TestSealedLayerCannotChange(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	write(t, m, 0, []byte{1})
	layer := freeze(t, m)
	if _, err := layer.File.WriteAt([]byte("header"), 0); err != nil {
		t.Errorf("write of a header: %v", err)
	}
	if err := layer.Seal(); err != nil {
		t.Fatal(err)
	}
	if _, err := layer.File.WriteAt([]byte("x"), DataStart); !errors.Is(err, unix.EPERM) {
		t.Errorf("write to sealed layer: %v, want EPERM", err)
	}
	if err := layer.File.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: %v, want EPERM", err)
	}
	child := newMemory(t, Config{Size: testSize, Layers: []Layer{layer}})
	write(t, child, 0, []byte{2})
	if v, _ := m.ReadUint16(0); v != 1 {
		t.Errorf("parent reads %d after the child's write", v)
	}
}

// A freeze that cannot store its layer leaves the memory as it was.
func TestFreezeFails(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	write(t, m, 3*PageSize, bytes.Repeat([]byte{3}, 4*PageSize))
	before := dump(t, m)
	descriptors := openDescriptors(t)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	// A limit on file sizes stands in for a host that is out of memory. The
	// runtime ignores the signal that comes with it.
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 2 * PageSize, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := m.Freeze()
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.EFBIG) {
		t.Fatalf("freeze: %v, want EFBIG", err)
	}
	if n := openDescriptors(t); n != descriptors {
		t.Errorf("%d descriptors left open", n-descriptors)
	}
	wantContents(t, m, before)
	wantPrivate(t, m, 3, 4, 5, 6)
	layer := freeze(t, m)
	if got := pagesOf(layer.Extents); !slices.Equal(got, []uint64{3, 4, 5, 6}) {
		t.Errorf("second try froze %v", got)
	}
}

// A large layer never takes much more memory than it has pages, and when it cannot
// be stored half-way, nothing of it is lost.
func TestFreezeLarge(t *testing.T) {
	const pages = 5 * partPages / 2
	m := newMemory(t, Config{Size: 64 << 20})
	fill := func(v byte) {
		for n := range uint64(pages) {
			if n%partPages < 3*partPages/4 || n%3 == 0 { // runs, and single pages
				write(t, m, n*PageSize, []byte{v, byte(n), byte(n >> 8)})
			}
		}
	}
	fill(1)
	written, err := m.Private()
	if err != nil {
		t.Fatal(err)
	}
	before := dump(t, m)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: (partPages + 10) * PageSize, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, err = m.Freeze()
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.EFBIG) {
		t.Fatalf("freeze: %v, want EFBIG", err)
	}
	if m.owed == nil {
		t.Error("nothing was mapped before it failed")
	}
	wantContents(t, m, before)
	again, err := m.Private()
	if err != nil || !slices.Equal(pagesOf(again), pagesOf(written)) {
		t.Fatalf("%d pages count as written after a freeze that failed, %d before (%v)", len(pagesOf(again)), len(pagesOf(written)), err)
	}
	layer := freeze(t, m)
	if !slices.Equal(pagesOf(layer.Extents), pagesOf(written)) {
		t.Errorf("the layer has %d pages, want %d", len(pagesOf(layer.Extents)), len(pagesOf(written)))
	}
	wantContents(t, m, before)
	wantPrivate(t, m)
	wantContents(t, newMemory(t, Config{Size: 64 << 20, Layers: []Layer{layer}}), before)
}

// model is what a memory should be: its contents, and the pages written since
// the last freeze.
type model struct {
	data    []byte
	written map[uint64]bool
}

func (o *model) pages() []uint64 {
	pages := make([]uint64, 0, len(o.written))
	for n := range o.written {
		pages = append(pages, n)
	}
	slices.Sort(pages)
	return pages
}

// discard gives pages back, which become zeros or, when mappings have run out,
// stay what they are.
func (o *model) discard(t *testing.T, r *rand.Rand, m *Memory) {
	for range r.IntN(4) {
		n := PageSize * (1 + r.IntN(40))
		at := r.IntN(512 * PageSize)
		if err := m.Discard(uint64(at), uint64(n)); err != nil {
			t.Fatal(err)
		}
		for page := (at + PageSize - 1) / PageSize; page < (at+n)/PageSize; page++ {
			if m.view[find(m.view, uint64(page))].zero() && isZero(m.page(uint64(page))) {
				clear(o.data[page*PageSize : (page+1)*PageSize])
				delete(o.written, uint64(page))
			} else if m.budget > 40 {
				t.Fatalf("page %d was not discarded", page)
			}
		}
	}
}

// mutate writes random things of random sizes, a third of them zeros.
func (o *model) mutate(t *testing.T, r *rand.Rand, m *Memory) {
	for range 1 + r.IntN(60) {
		n := 1 + r.IntN(3*PageSize)
		if r.IntN(4) == 0 {
			n = PageSize * (1 + r.IntN(4))
		}
		// Most writes go to a small part, so that layers overlap a lot.
		at := r.IntN(512 * PageSize)
		if r.IntN(5) == 0 {
			at = r.IntN(testSize)
		}
		if r.IntN(2) == 0 {
			at &^= PageSize - 1
		}
		at = min(at, testSize-n)
		p := make([]byte, n)
		if r.IntN(3) != 0 {
			for i := range p {
				p[i] = byte(r.Uint32())
			}
		}
		write(t, m, uint64(at), p)
		copy(o.data[at:], p)
		for page := at / PageSize; page <= (at+n-1)/PageSize; page++ {
			o.written[uint64(page)] = true
		}
	}
}

// Random writes and freezes, fifty layers deep, against a plain slice: the
// contents, the set of written pages, what each layer stores, and what children
// made from a stack of layers see. A small budget of mappings changes nothing
// that can be seen.
func TestFreezeAgainstModel(t *testing.T) {
	for name, c := range map[string]struct{ mappings, generations int }{
		"mapped":         {0, 50},
		"copied":         {40, 30},
		"nothing mapped": {1, 20},
	} {
		t.Run(name, func(t *testing.T) {
			withScanners(t, func(t *testing.T, s scanner) { runModel(t, s, c.mappings, c.generations) })
		})
	}
}

func runModel(t *testing.T, s scanner, mappings, generations int) {
	r := rand.New(rand.NewPCG(1, uint64(mappings)))
	config := Config{Size: testSize, Mappings: mappings}
	m := newMemory(t, config)
	m.scan = s
	descriptors := openDescriptors(t)
	o := model{data: make([]byte, testSize), written: map[uint64]bool{}}
	for generation := range generations {
		o.mutate(t, r, m)
		o.discard(t, r, m)
		o.mutate(t, r, m)
		// A read makes nothing private, whatever it finds there.
		m.ReadAt(make([]byte, 64*PageSize), uint64(r.IntN(testSize-64*PageSize)))
		checkWritten(t, m, &o)
		before := bytes.Clone(o.data)
		if r.IntN(2) == 0 {
			if err := m.PrepareFreeze(); err != nil {
				t.Fatal(err)
			}
			o.mutate(t, r, m) // the guest does not stand still
			before = bytes.Clone(o.data)
		}
		layer := freeze(t, m)
		if r.IntN(2) == 0 {
			if err := layer.Seal(); err != nil {
				t.Fatal(err)
			}
		}
		config.Layers = append(config.Layers, layer)
		checkLayerContents(t, layer, o.data)
		wantPrivate(t, m)
		clear(o.written)
		if generation%10 == 9 {
			wantContents(t, m, before)
			child := newMemory(t, config)
			child.scan = s
			wantContents(t, child, before)
			wantPrivate(t, child)
			if n, limit := len(child.mapped), child.budget; n > max(limit, 1) {
				t.Fatalf("%d mappings with a budget of %d", n, limit)
			}
			if generation == 19 { // go on in the child
				m = child
			}
		}
	}
	if n := len(m.mapped); n > m.budget {
		t.Errorf("%d mappings with a budget of %d", n, m.budget)
	}
	// One for each layer, which is the test's, for each child its page map and the
	// layers that it has hot pages of, and those that a memory keeps.
	if n := openDescriptors(t) - descriptors; mappings == 0 && n > generations+generations/10*(1+maxKeptLayers)+2*(2*maxKeptLayers+1) {
		t.Errorf("%d descriptors after %d freezes", n, generations)
	}
}

// checkWritten compares the private pages with those written. A copied page that
// was written with what it had before does not count as written.
func checkWritten(t *testing.T, m *Memory, o *model) {
	t.Helper()
	extents, err := m.Private()
	if err != nil {
		t.Fatal(err)
	}
	got := pagesOf(extents)
	want := slices.DeleteFunc(o.pages(), func(n uint64) bool { return m.copied.has(n) && !slices.Contains(got, n) })
	if !slices.Equal(got, want) {
		t.Fatalf("private pages %v, want %v", got, want)
	}
}

func checkLayerContents(t *testing.T, l Layer, data []byte) {
	t.Helper()
	next := int64(DataStart)
	for _, e := range l.Extents {
		for i := range e.Count {
			want := data[(e.Start+i)*PageSize:][:PageSize]
			page := make([]byte, PageSize)
			if e.Offset != ZeroExtent {
				if e.Offset+int64(i*PageSize) != next {
					t.Fatalf("page %d is not packed: at %d, want %d", e.Start+i, e.Offset, next)
				}
				if _, err := l.File.ReadAt(page, next); err != nil {
					t.Fatal(err)
				}
				if isZero(page) {
					t.Fatalf("page %d of zeros is stored", e.Start+i)
				}
				next += PageSize
			}
			if !bytes.Equal(page, want) {
				t.Fatalf("page %d differs in the layer", e.Start+i)
			}
		}
	}
	if info, err := l.File.Stat(); err != nil || info.Size() < next {
		t.Fatalf("file has %d bytes (%v), want %d or more", info.Size(), err, next)
	}
}

// The number of mappings that the kernel counts is never more than we do.
func TestMappingsAreBounded(t *testing.T) {
	m := newMemory(t, Config{Size: testSize, Mappings: 64})
	for range 3 {
		for n := uint64(0); n < 2000; n += 2 {
			write(t, m, n*PageSize, []byte{byte(n) | 1})
		}
		freeze(t, m)
		if got := kernelMappings(t, m); got > 64 {
			t.Fatalf("the kernel has %d mappings of the RAM, the budget is 64", got)
		}
	}
}

// More scattered pages than any buffer on the way holds, frozen until the
// mappings run out and beyond.
func TestFreezeManyScatteredPages(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		m := newMemory(t, Config{Size: 4 * testSize, Mappings: 5000})
		m.scan = s
		want := make([]byte, 4*testSize)
		r := rand.New(rand.NewPCG(3, 4))
		for generation := range 5 {
			written := map[uint64]bool{}
			for range 1500 {
				n := uint64(r.IntN(int(m.pages)))
				v := byte(generation*50 + r.IntN(50) + 1)
				write(t, m, n*PageSize, []byte{v})
				written[n] = want[n*PageSize] != v || written[n] || !m.copied.has(n)
				want[n*PageSize] = v
			}
			layer := freeze(t, m)
			for _, n := range pagesOf(layer.Extents) {
				if !written[n] {
					t.Fatalf("page %d was not written, but is in layer %d", n, generation)
				}
				delete(written, n)
			}
			for n, changed := range written {
				if changed {
					t.Fatalf("page %d was written, but is not in layer %d", n, generation)
				}
			}
			wantContents(t, m, want)
			wantPrivate(t, m)
		}
	})
}

func kernelMappings(t *testing.T, m *Memory) int {
	t.Helper()
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for line := range bytes.Lines(all) {
		var start, end uint64
		if n, _ := sscanRange(line, &start, &end); n == 2 && start >= uint64(m.base) && end <= uint64(m.base)+m.size {
			count++
		}
	}
	return count
}

func BenchmarkFreeze1000Pages(b *testing.B) {
	m := newMemory(b, Config{Size: 512 << 20})
	r := rand.New(rand.NewPCG(1, 2))
	for b.Loop() {
		b.StopTimer()
		for range 1000 {
			write(b, m, uint64(r.IntN(512<<20-8)), []byte{1})
		}
		b.StartTimer()
		l, err := m.Freeze()
		if err != nil {
			b.Fatal(err)
		}
		l.Close()
	}
}
