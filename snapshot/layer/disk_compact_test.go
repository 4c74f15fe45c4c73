package layer

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// compact merges what there is to merge.
func compact(t testing.TB, d *Disk) (used bool) {
	t.Helper()
	f := newTop(t)
	used, err := d.Compact(t.Context(), f)
	if err != nil {
		t.Error(err)
	}
	if !used {
		f.Close()
	}
	return used
}

// A disk that is frozen hundreds of times keeps few layers and descriptors, and
// each of its stacks reads as what it was.
func TestCompact(t *testing.T) {
	const blocks, freezes = 200, 600
	r := rand.New(rand.NewPCG(3, 4))
	base := filled(blocks * UnitSize)
	d := newDisk(t, DiskConfig{Size: blocks * UnitSize, Layers: []*Layer{rawLayer(t, base)}})
	flat := bytes.Clone(base)
	before := openFiles(t)
	var kept []*Layer // of one of the stacks
	var then []byte
	for i := range freezes {
		for range 1 + r.IntN(3) {
			block := r.Int64N(blocks - 2)
			part := flat[block*UnitSize : (block+1+r.Int64N(2))*UnitSize]
			if r.IntN(4) == 0 {
				clear(part)
				if err := d.Discard(block*UnitSize, int64(len(part))); err != nil {
					t.Fatal(err)
				}
				continue
			}
			copy(part, filled(len(part)))
			if _, err := d.WriteAt(part, block*UnitSize); err != nil {
				t.Fatal(err)
			}
		}
		if i%97 == 50 {
			if err := d.Discard(0, blocks*UnitSize/2); err != nil {
				t.Fatal(err)
			}
			clear(flat[:blocks*UnitSize/2])
		}
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
		if i == 300 {
			for _, l := range d.Stack() {
				kept = append(kept, must(l.Dup())(t))
			}
			then = bytes.Clone(flat)
		}
		compact(t, d)
		if n := len(d.Stack()); n > 1+2*MergeWidth+freezes/MergeWidth/MergeWidth {
			t.Fatalf("freeze %d: %d layers", i, n)
		}
		if i%37 == 0 {
			expectDisk(t, d, flat)
		}
	}
	expectDisk(t, d, flat)
	d.gone.Wait()
	if n := openFiles(t) - before; n > 3*MergeWidth+len(kept) {
		t.Errorf("%d descriptors more than before", n)
	}
	if !bytes.Equal(seen(t, d.Stack(), blocks), flat) {
		t.Error("the stack is not the disk")
	}
	if !bytes.Equal(seen(t, kept, blocks), then) {
		t.Error("the stack of an earlier freeze is not what it was")
	}
	for _, l := range kept {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := d.Reset(newTop(t)); err != nil {
		t.Fatal(err)
	}
	expectDisk(t, d, base)
}

// What was written before layers were merged is on stable storage after a flush:
// in the file that has it now.
func TestFlushAfterCompact(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 64 * UnitSize})
	synced := map[int]bool{}
	d.syncs.datasync = func(fd int) error {
		synced[fd] = true
		return unix.Fdatasync(fd)
	}
	for i := range MergeWidth {
		if _, err := d.WriteAt(filled(UnitSize), int64(i)*UnitSize); err != nil {
			t.Fatal(err)
		}
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	if !compact(t, d) || len(d.Stack()) != 1 {
		t.Fatalf("%d layers", len(d.Stack()))
	}
	if err := d.Flush(); err != nil {
		t.Fatal(err)
	}
	if merged := int(d.Stack()[0].File().Fd()); !synced[merged] || len(synced) != 2 {
		t.Errorf("synced %v, want %d and the top", synced, merged)
	}
}

// A merger that fails, or comes too late, changes nothing and leaves the file to
// the caller.
func TestCompactThatFails(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 64 * UnitSize})
	flat := make([]byte, 64*UnitSize)
	for i := range MergeWidth {
		copy(flat[i*UnitSize:], filled(UnitSize))
		if _, err := d.WriteAt(flat[i*UnitSize:(i+1)*UnitSize], int64(i)*UnitSize); err != nil {
			t.Fatal(err)
		}
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	null := must(os.OpenFile("/dev/full", os.O_RDWR, 0))(t)
	defer null.Close()
	if used, err := d.Compact(t.Context(), null); used || err == nil {
		t.Errorf("used %v, %v", used, err)
	}
	expectDisk(t, d, flat)

	run := d.toMerge()
	f := newTop(t)
	defer f.Close()
	if err := d.Reset(newTop(t)); err != nil {
		t.Fatal(err)
	}
	if err := d.exchange(run.Layers, &Layer{core: new(core), file: f}); !errors.Is(err, errChanged) {
		t.Errorf("a merger of layers that are gone: %v", err)
	}
	expectDisk(t, d, make([]byte, len(flat)))
}
