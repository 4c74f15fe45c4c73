package layer

import (
	"cmp"
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// top is the bookkeeping of a disk's writable file: which slot (4096 bytes at
// DataOffset + slot*4096) belongs to which block, and which blocks this top
// makes zero. Where a block is found is Disk.places' business.
type top struct {
	owner []uint64 // by slot: block+1, or 0 when the slot is free
	free  []slotRun
	zeros blockSet
}

type slotRun struct{ start, count uint64 }

// allocate takes up to want consecutive slots, at least one.
func (t *top) allocate(want uint64) slotRun {
	if n := len(t.free); n > 0 {
		last := &t.free[n-1]
		run := slotRun{last.start, min(want, last.count)}
		last.start += run.count
		last.count -= run.count
		if last.count == 0 {
			t.free = t.free[:n-1]
		}
		return run
	}
	run := slotRun{uint64(len(t.owner)), want}
	t.owner = append(t.owner, make([]uint64, want)...)
	return run
}

// assign records that run holds the blocks from block on.
func (t *top) assign(run slotRun, block uint64) {
	for i := range run.count {
		t.owner[run.start+i] = block + i + 1
	}
}

// release gives slots back.
func (t *top) release(run slotRun) {
	if run.count == 0 {
		return
	}
	clear(t.owner[run.start : run.start+run.count])
	if n := len(t.free); n > 0 && t.free[n-1].start+t.free[n-1].count == run.start {
		t.free[n-1].count += run.count
		return
	}
	t.free = append(t.free, run)
}

// punch returns a run's space to the file system. One that cannot do it only
// costs space: every byte of a slot is written before it is used again.
func punch(f *os.File, run slotRun) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		off, n := DataOffset+int64(run.start)*UnitSize, int64(run.count)*UnitSize
		for {
			err := unix.Fallocate(int(fd), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
			if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
}

// frozenTop is what a former top leaves for its layer: taken over in constant
// time, made into extents when somebody asks.
type frozenTop struct {
	owner []uint64
	zeros blockSet
}

func (t *frozenTop) makeExtents() []Extent {
	type pair struct{ block, slot uint64 }
	pairs := make([]pair, 0, len(t.owner))
	for slot, owner := range t.owner {
		if owner != 0 {
			pairs = append(pairs, pair{owner - 1, uint64(slot)})
		}
	}
	slices.SortFunc(pairs, func(a, b pair) int { return cmp.Compare(a.block, b.block) })

	var extents []Extent
	add := func(p pair) {
		extents = appendExtent(extents, Extent{p.block, 1, DataOffset + int64(p.slot)*UnitSize})
	}
	// A block is in one of the two only, so they merge by their starts.
	for start, count := range t.zeros.runs() {
		for len(pairs) > 0 && pairs[0].block < start {
			add(pairs[0])
			pairs = pairs[1:]
		}
		extents = appendExtent(extents, Extent{start, count, ZeroExtent})
	}
	for _, p := range pairs {
		add(p)
	}
	return extents
}
