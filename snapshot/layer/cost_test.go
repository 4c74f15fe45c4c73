package layer

import (
	"context"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// counted runs something a few times and returns the smallest time, divided by
// how often it did what it is about.
func counted(times int, do func()) time.Duration {
	best := time.Duration(1 << 62)
	for range 3 {
		begun := time.Now()
		do()
		best = min(best, time.Since(begun))
	}
	return best / time.Duration(times)
}

// TestDiskCosts prints the constants of the disk section of docs/cost-model.md.
func TestDiskCosts(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireCounted(t)
	for _, cost := range []struct {
		what    string
		measure func(t *testing.T) time.Duration
	}{
		{"write of a block that the top does not have", costOfNewBlock},
		{"write of a block that the top has", costOfOldBlock},
		{"write of 512 bytes into a block of a layer", costOfPartBlock},
		{"discard, for each block that the top has", costOfDiscard},
		{"flush", costOfFlush},
		{"seal, for each block", costOfSeal},
		{"open a layer, for each extent", costOfOpen},
		{"flatten 50 layers, for each extent", costOfFlatten},
		{"copy into a store, for each block", costOfCopy},
		{"open a raw image of which nothing is known", costOfRaw},
		{"open a raw image of a snapshot", costOfKnownRaw},
		{"open a raw image that was checked", costOfCheckedRaw},
	} {
		t.Logf("%-45s %8.2f µs", cost.what, float64(cost.measure(t).Nanoseconds())/1000)
	}
}

const costBlocks = 500

// scattered writes costBlocks blocks with gaps, each an extent of its own.
func scattered(t *testing.T, d *Disk) {
	t.Helper()
	p := pattern(1, 7)
	for i := range int64(costBlocks) {
		if _, err := d.WriteAt(p, 2*i*UnitSize); err != nil {
			t.Fatal(err)
		}
	}
}

func bigDisk(t *testing.T) *Disk { return newDisk(t, DiskConfig{Size: 1 << 30}) }

func frozen(t *testing.T, d *Disk) *Layer {
	t.Helper()
	l := must(d.Freeze(newTop(t)))(t)
	t.Cleanup(func() { l.Close() })
	return l
}

func costOfNewBlock(t *testing.T) time.Duration {
	d := bigDisk(t)
	return counted(costBlocks, func() {
		scattered(t, d)
		frozen(t, d)
	})
}

func costOfOldBlock(t *testing.T) time.Duration {
	d := bigDisk(t)
	scattered(t, d)
	return counted(costBlocks, func() { scattered(t, d) })
}

func costOfPartBlock(t *testing.T) time.Duration {
	d := bigDisk(t)
	scattered(t, d)
	return counted(costBlocks, func() {
		frozen(t, d)
		for i := range int64(costBlocks) {
			if _, err := d.WriteAt(make([]byte, 512), 2*i*UnitSize+512); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func costOfDiscard(t *testing.T) time.Duration {
	best := time.Duration(1 << 62)
	d := bigDisk(t)
	for range 3 {
		if _, err := d.WriteAt(make([]byte, costBlocks*UnitSize), 0); err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		if err := d.Discard(0, costBlocks*UnitSize); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(begun)/costBlocks)
	}
	return best
}

func costOfFlush(t *testing.T) time.Duration {
	d := bigDisk(t)
	return counted(1, func() {
		if _, err := d.WriteAt([]byte{1}, 0); err != nil {
			t.Fatal(err)
		}
		if err := d.Flush(); err != nil {
			t.Fatal(err)
		}
	})
}

func costOfSeal(t *testing.T) time.Duration {
	best := time.Duration(1 << 62)
	for range 3 {
		d := bigDisk(t)
		scattered(t, d)
		l := frozen(t, d)
		begun := time.Now()
		if err := l.Seal(); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(begun)/costBlocks)
	}
	return best
}

// scatteredLayer is a sealed layer of costBlocks extents.
func scatteredLayer(t *testing.T) *Layer {
	t.Helper()
	d := bigDisk(t)
	scattered(t, d)
	l := frozen(t, d)
	if err := l.Seal(); err != nil {
		t.Fatal(err)
	}
	return l
}

func costOfOpen(t *testing.T) time.Duration {
	l := scatteredLayer(t)
	return counted(costBlocks, func() {
		if _, err := Open(l.File()); err != nil {
			t.Fatal(err)
		}
	})
}

func costOfFlatten(t *testing.T) time.Duration {
	p := pile{size: 16 << 20, depth: 50, run: 4}
	stack := p.grow(t).Stack()
	extents := 0
	for _, l := range stack {
		extents += len(l.Extents())
	}
	return counted(extents, func() { flatten(stack) })
}

func costOfCopy(t *testing.T) time.Duration {
	l := scatteredLayer(t)
	return counted(costBlocks, func() {
		if err := Copy(context.Background(), newTop(t), l); err != nil {
			t.Fatal(err)
		}
	})
}

func costOfRaw(t *testing.T) time.Duration {
	f := rawLayer(t, filled(16<<20)).File()
	return counted(1, func() { must(OpenRaw(f))(t) })
}

func costOfKnownRaw(t *testing.T) time.Duration {
	l := rawLayer(t, filled(16<<20))
	known := RawOptions{ID: l.ID(), Checksum: must(l.RawChecksum(t.Context()))(t)}
	return counted(1, func() { must(OpenRawWith(l.File(), known))(t) })
}

func costOfCheckedRaw(t *testing.T) time.Duration {
	l := rawLayer(t, filled(16<<20))
	return counted(1, func() { must(OpenRawWith(l.File(), RawOptions{ID: l.ID(), Checked: true}))(t) })
}
