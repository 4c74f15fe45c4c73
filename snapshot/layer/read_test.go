package layer

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// Any part of a stack is read as a disk of the same layers reads it.
func TestReadUnits(t *testing.T) {
	const units = 64
	r := rand.New(rand.NewPCG(3, 4))
	var stack []*Layer
	for range 12 {
		stack = append(stack, step(t, units, r.Uint64N(units-8), 1+r.Uint64N(8)))
	}
	want := seen(t, stack, units)
	for range 100 {
		start := r.Uint64N(units)
		p := filled(int(1+r.Uint64N(units-start)) * UnitSize)
		if err := ReadUnits(stack, start, p); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(p, want[start*UnitSize:][:len(p)]) {
			t.Fatalf("%d units from unit %d on read differently", len(p)/UnitSize, start)
		}
	}
	p := filled(2 * UnitSize)
	if err := ReadUnits(nil, 5, p); err != nil || !isZero(p[:UnitSize]) || !isZero(p[UnitSize:]) {
		t.Errorf("nothing is not zeros: %v", err)
	}
}
