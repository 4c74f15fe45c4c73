package layer

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"
)

// step is a layer that writes count units from start on, each with its own content.
func step(t testing.TB, units, start, count uint64) *Layer {
	t.Helper()
	f := memfd(t)
	if _, err := f.WriteAt(filled(int(count*UnitSize)), DataOffset); err != nil {
		t.Fatal(err)
	}
	extents := []Extent{{Start: start, Count: count, Offset: DataOffset}}
	if start > 0 {
		extents = append([]Extent{{Start: start - 1, Count: 1, Offset: ZeroExtent}}, extents...)
	}
	return must(Seal(f, SealOptions{Kind: KindDisk, Units: units, Extents: extents}))(t)
}

// merged is the stack that a plan comes to.
func merged(t testing.TB, runs []Run) []*Layer {
	t.Helper()
	var stack []*Layer
	for _, r := range runs {
		if !r.Merged() {
			stack = append(stack, r.Layers[0])
			continue
		}
		f := tempFile(t)
		if err := r.Write(context.Background(), f, WriteOptions{Checksums: true}); err != nil {
			t.Fatal(err)
		}
		l := must(Open(f))(t)
		if err := l.Verify(context.Background()); err != nil {
			t.Fatal(err)
		}
		if l.ID() != r.ID() {
			t.Fatalf("merged layer is %s, want %s", l.ID(), r.ID())
		}
		stack = append(stack, l)
	}
	return stack
}

// seen is what a stack reads as.
func seen(t testing.TB, stack []*Layer, units uint64) []byte {
	t.Helper()
	dups := make([]*Layer, len(stack))
	for i, l := range stack {
		dups[i] = must(l.Dup())(t)
	}
	d := must(NewDisk(DiskConfig{Size: int64(units) * UnitSize, Layers: dups, ReadOnly: true}))(t)
	defer d.Close()
	b := make([]byte, units*UnitSize)
	if _, err := d.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

func ids(runs []Run) []string {
	list := make([]string, len(runs))
	for i, r := range runs {
		list[i] = r.ID()
	}
	return list
}

// A stack of 300 layers is stored as few, reads the same at each step, and what
// one step merged is what the next one finds, from whichever stack it began.
func TestPlanAndMerge(t *testing.T) {
	const units = 64
	r := rand.New(rand.NewPCG(1, 2))
	var whole []*Layer // as a machine has it that was never restored
	var stack []*Layer // as one that is restored at each step
	known := map[string]bool{}
	deepest, fresh := 0, 0
	for i := range 300 {
		start := r.Uint64N(units - 4)
		l := step(t, units, start, 1+r.Uint64N(4))
		whole, stack = append(whole, l), append(stack, l)
		planned, runs := Plan(whole), Plan(stack)
		if a, b := ids(planned), ids(runs); len(a) != len(b) || !bytes.Equal(joined(a), joined(b)) {
			t.Fatalf("step %d: planned %v from the whole stack, %v from the stored one", i, a, b)
		}
		for _, id := range ids(runs) {
			if !known[id] {
				known[id] = true
				fresh++
			}
		}
		deepest = max(deepest, len(runs))
		stack = merged(t, runs)
		if i%50 == 49 {
			want := seen(t, whole, units)
			if !bytes.Equal(seen(t, stack, units), want) {
				t.Fatalf("step %d: merged stack reads differently", i)
			}
			if !bytes.Equal(seen(t, merged(t, planned), units), want) {
				t.Fatalf("step %d: whole stack, merged at once, reads differently", i)
			}
		}
	}
	if deepest > 2*MergeWidth {
		t.Errorf("stack of up to %d layers", deepest)
	}
	// Each step one of its own, and each MergeWidth one merged layer.
	if fresh > 300+300/MergeWidth+1 {
		t.Errorf("%d different layers for 300 steps", fresh)
	}
}

func joined(list []string) []byte {
	var b []byte
	for _, s := range list {
		b = append(b, s...)
	}
	return b
}

func TestPlanLeavesLargeLayersAlone(t *testing.T) {
	large := func() *Layer {
		f := memfd(t)
		if err := f.Truncate(DataOffset + (MergeUnits+1)*UnitSize); err != nil {
			t.Fatal(err)
		}
		return must(Seal(f, SealOptions{Kind: KindMemory, Units: 2 * MergeUnits, Extents: []Extent{{0, MergeUnits + 1, DataOffset}}}))(t)
	}
	var stack []*Layer
	small := func(n int) {
		for range n {
			stack = append(stack, step(t, 64, 1, 1))
		}
	}
	stack = append(stack, large())
	small(3)
	stack = append(stack, large(), large())
	small(1)
	stack = append(stack, large())
	small(2)
	stack = append(stack, must(Seal(memfd(t), SealOptions{Kind: KindMemory, Units: 64}))(t)) // empty
	var got []int
	for _, r := range Plan(stack) {
		got = append(got, len(r.Layers))
	}
	want := []int{1, 3, 1, 1, 1, 1, 1, 1}
	if len(got) != len(want) {
		t.Fatalf("runs of %v layers, want %v", got, want)
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("runs of %v layers, want %v", got, want)
		}
	}
}
