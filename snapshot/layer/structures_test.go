package layer

import (
	"maps"
	"slices"
	"testing"
)

func TestBlockSetModel(t *testing.T) {
	r := testRand(t)
	const span = 3*setLeafBlocks + 100
	var s blockSet
	want := map[uint64]bool{}
	for step := range 400 {
		from := r.Uint64N(span)
		to := from + r.Uint64N(span-from+1)
		if r.IntN(2) == 0 {
			to = min(span, from+r.Uint64N(70))
		}
		if r.IntN(2) == 0 {
			s.add(from, to)
			for b := from; b < to; b++ {
				want[b] = true
			}
		} else {
			s.remove(from, to)
			for b := from; b < to; b++ {
				delete(want, b)
			}
		}
		var got []uint64
		for start, count := range s.runs() {
			for b := start; b < start+count; b++ {
				got = append(got, b)
			}
		}
		if !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
			t.Fatalf("step %d: sets differ", step)
		}
		block := r.Uint64N(span)
		in, n := s.run(block, 500)
		if in != want[block] || n == 0 || n > 500 {
			t.Fatalf("run(%d) = %v, %d", block, in, n)
		}
		for b := block; b < block+n; b++ {
			if want[b] != in {
				t.Fatalf("run(%d) = %v, %d: block %d differs", block, in, n, b)
			}
		}
		if n < 500 && want[block+n] == in {
			t.Fatalf("run(%d) = %v, %d is too short", block, in, n)
		}
	}
	if fullLeaf[0] != ^uint64(0) || fullLeaf[63] != ^uint64(0) {
		t.Fatal("the shared leaf was written to")
	}
}

// flatten against painting one layer over the other.
func TestFlattenModel(t *testing.T) {
	r := testRand(t)
	const units = 200
	for range 200 {
		type cell struct {
			file   uint32
			offset int64
		}
		painted := map[uint64]cell{}
		var layers []*Layer
		for file := range r.IntN(8) {
			var extents []Extent
			for at := r.Uint64N(20); at < units; {
				e := Extent{Start: at, Count: min(1+r.Uint64N(30), units-at), Offset: ZeroExtent}
				if r.IntN(3) > 0 {
					e.Offset = int64(1+r.IntN(1000)) * UnitSize
				}
				extents = append(extents, e)
				for i := range e.Count {
					if e.Offset == ZeroExtent {
						delete(painted, at+i)
					} else {
						painted[at+i] = cell{uint32(file), e.Offset + int64(i)*UnitSize}
					}
				}
				at = e.end() + r.Uint64N(20)
			}
			layers = append(layers, &Layer{core: &core{units: units, extents: extents}})
		}
		flat := flatten(layers)
		for block := uint64(0); block < units; {
			s := flat.lookup(block, units-block)
			if s.start != block || s.count == 0 {
				t.Fatalf("lookup(%d) = %+v", block, s)
			}
			for i := range s.count {
				want, ok := painted[block+i]
				if ok != (s.offset != ZeroExtent) || ok && (want.file != s.file || want.offset != s.offset+int64(i)*UnitSize) {
					t.Fatalf("block %d: %+v, want %+v %v", block+i, s, want, ok)
				}
			}
			block += s.count
		}
	}
}
