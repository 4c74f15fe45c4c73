package layer

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"testing"
)

// Diff against the comparison of two whole disks, for stacks with a common part.
func TestDiffModel(t *testing.T) {
	const units = 96
	r := rand.New(rand.NewPCG(3, 4))
	for round := range 60 {
		var a []*Layer
		for range r.IntN(4) {
			a = append(a, step(t, units, r.Uint64N(units-8), 1+r.Uint64N(8)))
		}
		b := slices.Clone(a)
		for range r.IntN(4) {
			b = append(b, step(t, units, r.Uint64N(units-8), 1+r.Uint64N(8)))
		}
		for range r.IntN(3) {
			a = append(a, step(t, units, r.Uint64N(units-8), 1+r.Uint64N(8)))
		}
		if len(b) > 0 { // a copy of the same content under the same identity
			b[0] = merged(t, Plan(b[:1]))[0]
		}
		got, err := Diff(context.Background(), a, b)
		if err != nil {
			t.Fatal(err)
		}
		x, y := seen(t, a, units), seen(t, b, units)
		var want []Range
		for u := range uint64(units) {
			if bytes.Equal(x[u*UnitSize:(u+1)*UnitSize], y[u*UnitSize:(u+1)*UnitSize]) {
				continue
			}
			if n := len(want); n > 0 && want[n-1].Start+want[n-1].Count == u {
				want[n-1].Count++
			} else {
				want = append(want, Range{u, 1})
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("round %d: %v, want %v", round, got, want)
		}
	}
}

// Units that hold the same in different layers are no difference, and zeros
// written over nothing are none.
func TestDiffOfEqualContent(t *testing.T) {
	l := step(t, 16, 5, 4)
	f := tempFile(t)
	data := make([]byte, 6*UnitSize)
	copy(data, contents(t, l)[5*UnitSize:9*UnitSize])
	if _, err := f.WriteAt(data, DataOffset); err != nil {
		t.Fatal(err)
	}
	again := must(Seal(f, SealOptions{Kind: KindDisk, Units: 16, Extents: []Extent{{5, 6, DataOffset}}}))(t)
	got, err := Diff(context.Background(), []*Layer{l}, []*Layer{again})
	if err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}
