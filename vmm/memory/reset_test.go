package memory

import (
	"bytes"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

func reset(t testing.TB, m *Memory) {
	t.Helper()
	if err := m.Reset(); err != nil {
		t.Fatal(err)
	}
}

func resetTo(t testing.TB, m *Memory, layers ...Layer) {
	t.Helper()
	if err := m.ResetTo(layers); err != nil {
		t.Fatal(err)
	}
}

func TestResetGivesPagesBack(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		m := newMemory(t, Config{Size: testSize, Layers: []Layer{
			{File: patternFile(t, 4, 1), Extents: []Extent{{Start: 2, Count: 4}}}}})
		m.scan = s
		before := dump(t, m)
		address := m.HostAddress(0)
		for range 3 {
			write(t, m, 3*PageSize+7, []byte("over data"))
			write(t, m, 9*PageSize, []byte("over zeros"))
			wantPrivate(t, m, 3, 9)
			reset(t, m)
			wantPrivate(t, m)
			wantContents(t, m, before)
		}
		if m.HostAddress(0) != address {
			t.Error("the memory was moved")
		}
	})
}

// What was frozen since goes too, and the layers stay good for others.
func TestResetBehindFreezes(t *testing.T) {
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{
		{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 0, Count: 8}}}}})
	before := dump(t, m)
	mappings, descriptors := kernelMappings(t, m), openDescriptors(t)
	for range 3 {
		write(t, m, 1*PageSize, bytes.Repeat([]byte{0xaa}, 2*PageSize))
		write(t, m, 5*PageSize, make([]byte, PageSize)) // zeros over data
		first := freeze(t, m)
		write(t, m, 2*PageSize, []byte("again"))
		write(t, m, 20*PageSize, []byte("elsewhere"))
		second := freeze(t, m)
		write(t, m, 2*PageSize, []byte("private"))
		after := dump(t, newMemory(t, Config{Size: testSize, Layers: []Layer{
			{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 0, Count: 8}}}, first, second}}))
		reset(t, m)
		wantPrivate(t, m)
		wantContents(t, m, before)
		if bytes.Equal(before, after) {
			t.Fatal("nothing was frozen")
		}
		if n := kernelMappings(t, m); n != mappings {
			t.Errorf("%d mappings, before the freezes %d", n, mappings)
		}
	}
	if n := openDescriptors(t) - descriptors; n > 3*(1+2+3+1) { // layers and memories of the test itself
		t.Errorf("%d more descriptors", n)
	}
}

func TestResetToAnotherStack(t *testing.T) {
	pattern := Layer{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 0, Count: 8}}}
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{pattern}})
	write(t, m, 1*PageSize, []byte("one"))
	one := freeze(t, m)
	write(t, m, 1*PageSize, []byte("two"))
	write(t, m, 30*PageSize, []byte("two"))
	two := freeze(t, m)
	other := Layer{File: patternFile(t, 3, 0x70), Extents: []Extent{
		{Start: 0, Count: 1, Offset: ZeroExtent}, {Start: 1, Count: 3}, {Start: 100, Count: 2}}}
	stacks := [][]Layer{{pattern}, {pattern, one}, {pattern, one, two}, {other}, {pattern, other}, {}, {one}}
	descriptors := 0
	for range 2 {
		for i, stack := range stacks {
			want := dump(t, newMemory(t, Config{Size: testSize, Layers: stack}))
			write(t, m, 1*PageSize, []byte("private"))
			write(t, m, 200*PageSize, []byte("private"))
			resetTo(t, m, stack...)
			wantPrivate(t, m)
			wantContents(t, m, want)
			write(t, m, 200*PageSize, []byte("private"))
			reset(t, m)
			wantContents(t, m, want)
			if len(m.sources) > len(stack) {
				t.Errorf("stack %d: %d sources of %d layers", i, len(m.sources), len(stack))
			}
		}
		for range stacks {
			m.Reset() // nothing piles up
		}
		if descriptors == 0 {
			descriptors = openDescriptors(t)
		}
	}
	if n := openDescriptors(t) - descriptors; n > 2*len(stacks)+6 { // those of the memories to compare with
		t.Errorf("%d more descriptors", n)
	}
}

func TestResetToChecksLayers(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	write(t, m, 0, []byte("kept"))
	before := dump(t, m)
	var bad *LayerError
	err := m.ResetTo([]Layer{{File: patternFile(t, 1, 1), Extents: []Extent{{Start: 0, Count: 2}}}})
	if !errors.As(err, &bad) {
		t.Fatalf("reset to a layer that is too short: %v", err)
	}
	wantContents(t, m, before)
}

func TestResetOfAClosedMemory(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	m.Close()
	for _, err := range []error{m.Reset(), m.ResetTo(nil)} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("reset: %v", err)
		}
	}
}

// What was flattened when the memory was made stays as it is.
func TestResetOfAFragmentedMemory(t *testing.T) {
	m := newMemory(t, Config{Size: 64 << 20, Mappings: 500, Layers: []Layer{scattered(t, 2000, 4)}})
	before := dump(t, m)
	for range 3 {
		write(t, m, 8*PageSize, []byte("private"))
		freeze(t, m)
		write(t, m, 9*PageSize, []byte("private"))
		if err := m.Discard(0, 4<<20); err != nil {
			t.Fatal(err)
		}
		freeze(t, m)
		reset(t, m)
		wantPrivate(t, m)
		wantContents(t, m, before)
		if n := kernelMappings(t, m); n > 500 {
			t.Errorf("%d mappings", n)
		}
	}
	if n := m.copied.count(); n > 1024 { // what the discard took out of the flat file
		t.Errorf("%d pages are copied", n)
	}
}

// A memory goes through random writes, freezes and resets, with as many mappings
// as it likes and with too few, and has what a plain array has.
func TestResetAgainstModel(t *testing.T) {
	for _, budget := range []int{0, 12} {
		withScanners(t, func(t *testing.T, s scanner) {
			rng := rand.New(rand.NewPCG(7, uint64(budget)))
			var extents []Extent
			for i := range uint64(20) {
				extents = append(extents, Extent{Start: 3 * i, Count: 2, Offset: int64(2*i) * PageSize})
			}
			extents[4].Offset = ZeroExtent
			m := newMemory(t, Config{Size: testSize, Mappings: budget, Layers: []Layer{{File: patternFile(t, 40, 1), Extents: extents}}})
			m.scan = s
			type state struct {
				layers []Layer
				ram    []byte
			}
			origin := state{[]Layer{{File: patternFile(t, 40, 1), Extents: extents}}, dump(t, m)}
			states := []state{origin}
			now := state{origin.layers, slices.Clone(origin.ram)}
			for step := range 120 {
				switch n := rng.IntN(11); {
				case n == 10:
					page := rng.Uint64N(70)
					if err := m.Discard(page*PageSize, 2*PageSize); err != nil {
						t.Fatal(err)
					}
					if gone := dump(t, m)[page*PageSize:][:2*PageSize]; bytes.Equal(gone, make([]byte, 2*PageSize)) {
						copy(now.ram[page*PageSize:], gone)
					} else if budget == 0 {
						t.Fatalf("pages %d+2 were not discarded", page)
					}
				case n < 6:
					page, data := rng.Uint64N(70), bytes.Repeat([]byte{byte(rng.IntN(4))}, PageSize)
					write(t, m, page*PageSize, data)
					copy(now.ram[page*PageSize:], data)
				case n < 8:
					now.layers = append(slices.Clone(now.layers), freeze(t, m))
					states = append(states, state{now.layers, slices.Clone(now.ram)})
				case n < 9:
					reset(t, m)
					now = state{origin.layers, slices.Clone(origin.ram)}
				default:
					origin = states[rng.IntN(len(states))]
					resetTo(t, m, origin.layers...)
					now = state{origin.layers, slices.Clone(origin.ram)}
				}
				if step%5 == 0 {
					wantContents(t, m, now.ram)
				}
			}
			wantContents(t, m, now.ram)
		})
	}
}

// held counts the pages that are private to the kernel, whatever is in them.
func held(t testing.TB, m *Memory) int {
	t.Helper()
	ranges, err := m.scan(m)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, r := range ranges {
		n += int(r.end - r.start)
	}
	return n
}

// What a guest writes now and then stays private; what it has not written for some
// lives is given back, and nothing of it is taken for a change.
func TestResetKeepsWhatIsWrittenAgain(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		m := newMemory(t, Config{Size: testSize, Layers: []Layer{
			{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 0, Count: 8}}}}})
		m.scan = s
		before := dump(t, m)
		written := map[uint64]int{} // the last life that did
		lives := [][]uint64{{1, 2, 40}, {1, 40}, {1, 3}, {}, {1}}
		for life := range len(lives) + maxIdle {
			var pages []uint64
			if life < len(lives) {
				pages = lives[life]
			}
			for _, n := range pages {
				write(t, m, n*PageSize+5, []byte("life"))
				written[n] = life
			}
			maps.DeleteFunc(written, func(_ uint64, last int) bool { return life-last >= maxIdle })
			wantPrivate(t, m, pages...)
			reset(t, m)
			wantContents(t, m, before)
			if n := held(t, m); n != len(written) {
				t.Errorf("life %d: %d pages are held, want %d", life, n, len(written))
			}
			wantPrivate(t, m)
			if l := freeze(t, m); len(l.Extents) != 0 {
				t.Errorf("life %d: nothing was written, but the next layer has %+v", life, l.Extents)
			}
		}
		if len(written) != 0 {
			t.Errorf("pages %v are held at last", written)
		}
	})
}

// A page that a guest writes all the time, without ever changing it, is given back once:
// that it comes right back shows that it is used.
func TestResetKeepsWhatIsWrittenAlike(t *testing.T) {
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{
		{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 0, Count: 8}}}}})
	before := dump(t, m)
	var history []int
	for range 4 * maxIdle {
		write(t, m, 3*PageSize, before[3*PageSize:4*PageSize])
		reset(t, m)
		wantContents(t, m, before)
		wantPrivate(t, m)
		history = append(history, held(t, m))
	}
	want := slices.Repeat([]int{1}, 4*maxIdle)
	want[maxIdle] = 0
	if !slices.Equal(history, want) {
		t.Errorf("%v pages were held after each life, want %v", history, want)
	}
}

// A reset gives a few pages back, not all that have become idle together.
func TestResetGivesIdlePagesBackByAndBy(t *testing.T) {
	const pages = 3*maxGivenBack + 1
	m := newMemory(t, Config{Size: testSize})
	for n := range uint64(pages) {
		write(t, m, 2*n*PageSize, []byte("life"))
	}
	for range maxIdle {
		reset(t, m)
	}
	for left := pages; left > 0; {
		if n := held(t, m); n != left {
			t.Fatalf("%d pages are held, want %d", n, left)
		}
		reset(t, m)
		left = max(0, left-maxGivenBack)
	}
	if n := held(t, m); n != 0 {
		t.Errorf("%d pages are held at last", n)
	}
}

func TestResetKeepsABoundedNumber(t *testing.T) {
	m := newMemory(t, Config{Size: 4 * maxReverted * PageSize})
	for range 2 {
		write(t, m, 0, bytes.Repeat([]byte{7}, 3*maxReverted*PageSize))
		reset(t, m)
		if n := held(t, m); n != maxReverted {
			t.Errorf("%d pages are held, want %d", n, maxReverted)
		}
		wantContents(t, m, make([]byte, m.Size()))
	}
	reset(t, m)
	if n := held(t, m); n != 0 {
		t.Errorf("%d pages are held after a life that wrote nothing, and they were many", n)
	}
}

// What a reset has left private stays in the next one if nobody has used the memory in
// between, however much it is.
func TestResetOfUnusedMemory(t *testing.T) {
	m := newMemory(t, Config{Size: 4 * maxReverted * PageSize})
	write(t, m, 0, bytes.Repeat([]byte{7}, maxReverted*PageSize))
	reset(t, m)
	pattern := Layer{File: patternFile(t, 64, 1), Extents: []Extent{{Start: 3 * maxReverted, Count: 64}}}
	for _, stack := range [][]Layer{{pattern}, {}} {
		m.Unused()
		resetTo(t, m, stack...)
		if n := held(t, m); n != maxReverted {
			t.Errorf("%d pages are held, want %d", n, maxReverted)
		}
		wantPrivate(t, m)
	}
	reset(t, m)
	if n := held(t, m); n != 0 {
		t.Errorf("%d pages are held after a life that wrote nothing", n)
	}
}

// A layer file that is cut off while a reset reads it is an error.
func TestResetWithoutBackingStore(t *testing.T) {
	f := patternFile(t, 8, 1)
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{{File: f, Extents: []Extent{{Start: 0, Count: 8}}}}})
	write(t, m, 5*PageSize, []byte("life"))
	reset(t, m)
	truncate(t, f, 0)
	err := guard(func() error {
		if m.originals[0].Bytes()[5*PageSize] == 0 {
			t.Log("read something")
		}
		return nil
	})
	if !errors.Is(err, ErrBackingLost) {
		t.Errorf("read of a file that was cut off: %v, want %v", err, ErrBackingLost)
	}
}

// What another stack has in pages that are private already is copied there, and not mapped
// over them, also where other pages lie between those that are copied anyway. Nobody can
// tell but by what is mapped and private.
func TestResetToPrivatePages(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		const first, long = 1000, 20 // pages; longer than what is copied anyway
		base := Layer{File: patternFile(t, 2048, 1), Extents: []Extent{{Start: 0, Count: 2048}}}
		parent := newMemory(t, Config{Size: testSize, Layers: []Layer{base}})
		write(t, parent, first*PageSize, bytes.Repeat([]byte{7}, long*PageSize))
		write(t, parent, 4000*PageSize, bytes.Repeat([]byte{8}, long*PageSize))
		write(t, parent, 1500*PageSize, make([]byte, 12*PageSize)) // zeros over the base
		stack := []Layer{base, freeze(t, parent)}
		write(t, parent, (first+5)*PageSize, []byte("hot"))
		write(t, parent, 30*PageSize, []byte("hot"))
		stack = append(stack, freeze(t, parent))
		want := dump(t, parent)

		m := newMemory(t, Config{Size: testSize, Layers: stack[:1]})
		m.scan = s
		for _, page := range []uint64{first, 4000, 1500} {
			write(t, m, page*PageSize, bytes.Repeat([]byte{9}, long*PageSize))
		}
		reset(t, m)
		private, mappings := held(t, m), kernelMappings(t, m)
		before := m.originals[0]
		resetTo(t, m, stack...)
		if n := kernelMappings(t, m); n != mappings {
			t.Errorf("%d mappings, before %d", n, mappings)
		}
		if n := held(t, m); n != private+1 {
			t.Errorf("%d private pages, before %d and one more to be copied", n, private)
		}
		if m.originals[0] != before {
			t.Error("the file of a layer that stays was mapped anew")
		}
		for range 3 {
			wantContents(t, m, want)
			wantPrivate(t, m)
			write(t, m, (first+2)*PageSize, []byte("life"))
			write(t, m, 1503*PageSize, []byte("life"))
			wantPrivate(t, m, first+2, 1503)
			after := dump(t, m)
			wantContents(t, newMemory(t, Config{Size: testSize, Layers: append(stack[:3:3], freeze(t, m))}), after)
			reset(t, m)
		}
		resetTo(t, m, base)
		wantContents(t, m, dump(t, newMemory(t, Config{Size: testSize, Layers: stack[:1]})))
	})
}

// The bytes of any stack are right wherever pages are private before: a model.
func TestResetToAnyStack(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 5))
	const pages = 512
	layers := make([]Layer, 6)
	for i := range layers {
		var extents []Extent
		offset := int64(0)
		for at := uint64(r.IntN(20)); at < pages; {
			n := min(uint64(1+r.IntN(30)), pages-at)
			e := Extent{Start: at, Count: n, Offset: offset}
			if r.IntN(4) == 0 {
				e.Offset = ZeroExtent
			} else {
				offset += int64(n * PageSize)
			}
			extents = append(extents, e)
			at += n + uint64(1+r.IntN(40))
		}
		layers[i] = Layer{File: patternFile(t, int(offset/PageSize), byte(40*i)), Extents: extents}
	}
	m := newMemory(t, Config{Size: testSize})
	for range 30 {
		var stack []Layer
		for _, l := range layers {
			if r.IntN(3) > 0 {
				stack = append(stack, l)
			}
		}
		want := dump(t, newMemory(t, Config{Size: testSize, Layers: stack}))
		for range r.IntN(40) {
			n := 1 + r.IntN(12)
			write(t, m, uint64(r.IntN(pages-n))*PageSize, bytes.Repeat([]byte{0xee}, n*PageSize))
		}
		if r.IntN(4) == 0 {
			freeze(t, m)
		}
		resetTo(t, m, stack...)
		wantPrivate(t, m)
		wantContents(t, m, want)
		if r.IntN(2) == 0 {
			write(t, m, uint64(r.IntN(pages))*PageSize, []byte("life"))
			reset(t, m)
			wantContents(t, m, want)
		}
	}
}
