package layer

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
)

// pile is a disk on which depth steps have each written runs of blocks all over
// it, until every block is written once, and content is what a flat disk of the
// same content holds.
type pile struct {
	size  int64
	depth int
	run   int // blocks that are written together
}

// grow returns the disk, still the one that was written to.
func (p pile) grow(t testing.TB) *Disk {
	t.Helper()
	d := newDisk(t, DiskConfig{Size: p.size})
	runs := rand.New(rand.NewPCG(1, uint64(p.depth))).Perm(int(p.size) / UnitSize / p.run)
	for step := range p.depth {
		from, to := step*len(runs)/p.depth, (step+1)*len(runs)/p.depth
		for _, run := range runs[from:to] {
			if _, err := d.WriteAt(pattern(p.run, byte(step)), int64(run*p.run)*UnitSize); err != nil {
				t.Fatal(err)
			}
		}
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// reopen returns a new disk of the same layers, as a clone has it.
func reopen(t testing.TB, d *Disk) *Disk {
	t.Helper()
	var stack []*Layer
	for _, l := range d.Stack() {
		stack = append(stack, must(l.Dup())(t))
	}
	return newDisk(t, DiskConfig{Size: d.Size(), Layers: stack})
}

// flat returns a disk of the same content in one layer, in order.
func flat(t testing.TB, d *Disk) *Disk {
	t.Helper()
	whole := make([]byte, d.Size())
	if _, err := d.ReadAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	copied := newDisk(t, DiskConfig{Size: d.Size()})
	if _, err := copied.WriteAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	if err := must(copied.Freeze(newTop(t)))(t).Close(); err != nil {
		t.Fatal(err)
	}
	return reopen(t, copied)
}

// readCost returns what one read of n bytes at a random place costs, the
// smallest of several rounds.
func readCost(t *testing.T, d *Disk, n int) time.Duration {
	t.Helper()
	const rounds, reads = 5, 200
	p := make([]byte, n)
	best := time.Duration(1 << 62)
	for range rounds {
		r := rand.New(rand.NewPCG(3, 4))
		begun := time.Now()
		for range reads {
			if _, err := d.ReadAt(p, r.Int64N((d.size-int64(n))/UnitSize)*UnitSize); err != nil {
				t.Fatal(err)
			}
		}
		best = min(best, time.Since(begun)/reads)
	}
	return best
}

// TestDeepReadCost holds a read through fifty layers to one and a half times one
// through a single layer, for a disk that grew its stack and for a clone's.
func TestDeepReadCost(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireCounted(t)
	for _, run := range []int{1, 16} {
		p := pile{size: 16 << 20, depth: 50, run: run}
		grown := p.grow(t)
		one := flat(t, grown)
		for name, deep := range map[string]*Disk{"grown": grown, "opened": reopen(t, grown)} {
			for _, n := range []int{UnitSize, 64 << 10} {
				want, got := readCost(t, one, n), readCost(t, deep, n)
				ratio := float64(got) / float64(want)
				t.Logf("%s, runs of %d blocks, reads of %d bytes: flat %v, deep %v: %.2f", name, run, n, want, got, ratio)
				if ratio > 1.5 {
					t.Errorf("%s, runs of %d blocks: a read of %d bytes costs %.2f times a flat one", name, run, n, ratio)
				}
			}
		}
	}
}

// A lookup through fifty layers takes one step in the index, wherever a block
// is, and a read allocates nothing.
func TestDeepLookup(t *testing.T) {
	p := pile{size: 8 << 20, depth: 50, run: 16}
	grown := p.grow(t)
	opened := reopen(t, grown)
	for name, d := range map[string]*Disk{"grown": grown, "opened": opened} {
		runs := 0
		for block := uint64(0); block < d.blocks; runs++ {
			block += d.lookup(block, d.blocks-block).count
		}
		// Neighbours of one step may be joined, none is cut.
		if most := int(d.blocks) / p.run; runs > most {
			t.Errorf("%s: %d runs, at most %d were written", name, runs, most)
		}
		buf := make([]byte, p.run*UnitSize)
		if n := testing.AllocsPerRun(100, func() {
			if _, err := d.ReadAt(buf, 5<<20); err != nil {
				t.Error(err)
			}
		}); n != 0 {
			t.Errorf("%s: a read allocates %v times", name, n)
		}
	}
	if n := len(opened.base()); n > int(opened.blocks)/p.run {
		t.Errorf("the flattened index has %d segments", n)
	}
}

// history is what a disk has been through before it is frozen.
type history struct {
	size     int64
	layers   int
	written  int // blocks, scattered
	discards int
}

func (h history) make(t testing.TB) *Disk {
	t.Helper()
	d := newDisk(t, DiskConfig{Size: h.size})
	block := filled(UnitSize)
	step := h.size / UnitSize / int64(h.written+1) * UnitSize
	write := func(n int) {
		for i := range n {
			if _, err := d.WriteAt(block, int64(i)*step); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range h.layers {
		write(10)
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	write(h.written)
	for i := range h.discards {
		if err := d.Discard(int64(i)*2*step, UnitSize); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// histories go from nothing to a large disk with a long past.
var histories = []history{
	{size: 64 << 20, written: 10},
	{size: 1 << 40, written: 10},
	{size: 1 << 40, layers: 50, written: 5_000, discards: 1_000},
}

// The same bytes are allocated for a freeze whatever was written before: nothing
// of the index is copied.
func TestFreezeAllocations(t *testing.T) {
	for _, h := range histories {
		d := h.make(t)
		top := newTop(t)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		l, err := d.Freeze(top)
		runtime.ReadMemStats(&after)
		if err := errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		// The lists of layers and of files may have to grow.
		if got := after.TotalAlloc - before.TotalAlloc; got > 8<<10 {
			t.Errorf("%+v: %d bytes allocated", h, got)
		}
	}
}

// TestFreezeCost holds a freeze to the same counted time whatever was written
// before.
func TestFreezeCost(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireCounted(t)
	costs := make([]time.Duration, len(histories))
	for i, h := range histories {
		costs[i] = 1 << 62
		for range 3 {
			d := h.make(t)
			top := newTop(t)
			runtime.GC() // not in the middle of it
			begun := time.Now()
			l, err := d.Freeze(top)
			costs[i] = min(costs[i], time.Since(begun))
			if err := errors.Join(err, l.Close()); err != nil {
				t.Fatal(err)
			}
		}
		t.Logf("%+v: %v", h, costs[i])
	}
	if least, most := slices.Min(costs), slices.Max(costs); most > 2*least {
		t.Errorf("a freeze costs from %v to %v", least, most)
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	return len(must(os.ReadDir("/proc/self/fd"))(t))
}

// A disk has one descriptor for each layer and one for its top, and refuses to
// grow beyond the layers that a manifest can name.
func TestDiskDescriptors(t *testing.T) {
	before := openFiles(t)
	d := must(NewDisk(DiskConfig{Size: 1 << 20, Top: memfd(t)}))(t)
	for i := range 200 {
		if _, err := d.WriteAt([]byte{byte(i)}, 0); err != nil {
			t.Fatal(err)
		}
		if err := must(d.Freeze(memfd(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := openFiles(t) - before; got != 201 {
		t.Errorf("200 layers and a top have %d descriptors", got)
	}
	for len(d.layers) < snapshot.MaxLayers {
		d.layers = append(d.layers, d.layers[0])
	}
	top := memfd(t)
	if _, err := d.Freeze(top); !errors.Is(err, snapshot.ErrTooLarge) {
		t.Errorf("freeze of a stack of %d: %v", len(d.layers), err)
	}
	d.layers = d.layers[:200]
	if err := errors.Join(top.Close(), d.Close()); err != nil {
		t.Error(err)
	}
	if got := openFiles(t) - before; got != 0 {
		t.Errorf("%d descriptors are left", got)
	}
}

// A disk that nothing was written to since the last freeze needs no other.
func TestDiskChanged(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 1 << 20, Layers: []*Layer{rawLayer(t, bytes.Repeat([]byte{1}, 1<<20))}})
	for name, change := range map[string]func() error{
		"write":          func() error { _, err := d.WriteAt([]byte{2}, 5); return err },
		"write again":    func() error { _, err := d.WriteAt([]byte{3}, 5); return err },
		"discard":        func() error { return d.Discard(0, 1<<19) },
		"discard behind": func() error { return d.Discard(1<<19, 1<<19) },
	} {
		if d.Changed() {
			t.Errorf("changed before %s", name)
		}
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if !d.Changed() {
			t.Errorf("not changed after %s", name)
		}
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.ReadAt(make([]byte, 512), 0); err != nil || d.Changed() {
		t.Errorf("a read changes the disk, %v", err)
	}
}
