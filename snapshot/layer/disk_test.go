package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// newTop returns an empty file that the disk is going to close.
func newTop(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("top", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "memfd:top")
}

func newDisk(t testing.TB, c DiskConfig) *Disk {
	t.Helper()
	if c.Top == nil && !c.ReadOnly {
		c.Top = newTop(t)
	}
	d := must(NewDisk(c))(t)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// rawLayer is a base image with the given content, to be closed by a disk.
func rawLayer(t testing.TB, content []byte) *Layer {
	t.Helper()
	f := newTop(t)
	if _, err := f.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	return must(OpenRaw(f))(t)
}

func expectDisk(t testing.TB, d *Disk, want []byte) {
	t.Helper()
	got := make([]byte, d.Size())
	if _, err := d.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("differs at %d (block %d)", i, i/UnitSize)
			}
		}
	}
}

// model is a disk and the flat bytes that it must equal.
type model struct {
	t    *testing.T
	r    *rand.Rand
	disk *Disk
	flat []byte
	// Every frozen step, with what the disk held then.
	layers []*Layer
	states [][]byte
	base   []byte
}

// span picks a range: small and anywhere, whole blocks, or large.
func (m *model) span() (off, n int) {
	size := len(m.flat)
	switch m.r.IntN(4) {
	case 0:
		off = m.r.IntN(size + 1)
		n = m.r.IntN(2 * UnitSize)
	case 1:
		off = m.r.IntN(size) / UnitSize * UnitSize
		n = UnitSize * m.r.IntN(9)
	case 2:
		off = m.r.IntN(size) / 512 * 512
		n = 512 * m.r.IntN(32)
	default:
		off = m.r.IntN(size)
		n = m.r.IntN(size - off + 1)
		if m.r.IntN(4) == 0 {
			n = size - off
		}
	}
	return off, min(n, size-off)
}

func (m *model) step() {
	t, d := m.t, m.disk
	off, n := m.span()
	switch op := m.r.IntN(100); {
	case op < 45:
		p := filled(n)
		if got, err := d.WriteAt(p, int64(off)); err != nil || got != n {
			t.Fatalf("write %d+%d: %d, %v", off, n, got, err)
		}
		copy(m.flat[off:], p)
	case op < 70:
		p := filled(n)
		if got, err := d.ReadAt(p, int64(off)); err != nil || got != n {
			t.Fatalf("read %d+%d: %d, %v", off, n, got, err)
		}
		if !bytes.Equal(p, m.flat[off:off+n]) {
			t.Fatalf("read %d+%d: wrong content", off, n)
		}
	case op < 82:
		if err := d.WriteZeroes(int64(off), int64(n)); err != nil {
			t.Fatal(err)
		}
		clear(m.flat[off : off+n])
	case op < 94:
		if err := d.Discard(int64(off), int64(n)); err != nil {
			t.Fatal(err)
		}
		from, to := (off+UnitSize-1)/UnitSize*UnitSize, (off+n)/UnitSize*UnitSize
		if off+n == len(m.flat) {
			to = len(m.flat)
		}
		if from < to {
			clear(m.flat[from:to])
		}
	case op < 96:
		if err := d.Flush(); err != nil {
			t.Fatal(err)
		}
	default:
		m.freeze()
	}
	m.check()
}

func (m *model) freeze() {
	l := must(m.disk.Freeze(newTop(m.t)))(m.t)
	m.t.Cleanup(func() { l.Close() })
	m.layers = append(m.layers, l)
	m.states = append(m.states, bytes.Clone(m.flat))
	compact(m.t, m.disk)
}

// check holds the disk's books against each other.
func (m *model) check() {
	d := m.disk
	owned := map[uint64]bool{}
	for slot, owner := range d.top.owner {
		if owner == 0 {
			continue
		}
		block := owner - 1
		owned[block] = true
		at, ok := d.places.get(block)
		if !ok || at.file() != d.files.number || at.unit() != uint64(slot)+1 {
			m.t.Fatalf("slot %d has block %d, the map says %v %v", slot, block, at, ok)
		}
		if d.zeros.has(block) || d.top.zeros.has(block) {
			m.t.Fatalf("block %d is both stored and zero", block)
		}
	}
	for key, l := range d.places.leaves {
		for i, at := range l.place {
			block := key*mapLeafBlocks + uint64(i)
			if (at != 0) != (l.present&(1<<i) != 0) {
				m.t.Fatalf("block %d: presence bit is wrong", block)
			}
			if at != 0 && at.file() == d.files.number && !owned[block] {
				m.t.Fatalf("block %d maps to a slot that is not its own", block)
			}
		}
	}
	var free uint64
	for _, run := range d.top.free {
		free += run.count
	}
	if free+uint64(len(owned)) != uint64(len(d.top.owner)) {
		m.t.Fatalf("%d slots: %d free, %d owned", len(d.top.owner), free, len(owned))
	}
}

// replay builds new disks from the frozen layers, in each way a layer
// travels, and compares every generation.
func (m *model) replay() {
	ctx := context.Background()
	for gen := range m.layers {
		var stack []*Layer
		if m.base != nil {
			stack = append(stack, rawLayer(m.t, m.base))
		}
		for i, l := range m.layers[:gen+1] {
			switch (gen + i) % 3 {
			case 0: // the handle, as a fork in the same process
				stack = append(stack, must(l.Dup())(m.t))
			case 1: // the sealed file, as a fork in another process
				if err := l.Seal(); err != nil {
					m.t.Fatal(err)
				}
				stack = append(stack, must(Open(must(dupFile(l.File()))(m.t)))(m.t))
			case 2: // the copy in a store
				f := newTop(m.t)
				if err := Copy(ctx, f, l); err != nil {
					m.t.Fatal(err)
				}
				copied := must(Open(f))(m.t)
				if err := copied.Verify(ctx); err != nil {
					m.t.Fatal(err)
				}
				stack = append(stack, copied)
			}
		}
		d := must(NewDisk(DiskConfig{Size: m.disk.Size(), Layers: stack, ReadOnly: true}))(m.t)
		expectDisk(m.t, d, m.states[gen])
		if err := d.Close(); err != nil {
			m.t.Fatal(err)
		}
	}
}

func TestDiskModel(t *testing.T) {
	for _, c := range []struct {
		name       string
		size, base int
	}{
		{"empty", 300 * UnitSize, 0},
		{"odd end", 130*UnitSize + 512, 0},
		{"one sector", 512, 512},
		{"base", 200 * UnitSize, 200 * UnitSize},
		{"grown base with an odd end", 200*UnitSize + 1024, 70*UnitSize + 1536},
		{"larger than a set's leaf", 5000 * UnitSize, 4500 * UnitSize},
	} {
		t.Run(c.name, func(t *testing.T) {
			steps := 600
			if c.size > 1<<22 || testing.Short() {
				steps = 150
			}
			m := &model{t: t, r: testRand(t), flat: make([]byte, c.size)}
			config := DiskConfig{Size: int64(c.size)}
			if c.base > 0 {
				m.base = filled(c.base)
				copy(m.flat, m.base)
				config.Layers = []*Layer{rawLayer(t, m.base)}
			}
			m.disk = newDisk(t, config)
			for range steps {
				m.step()
			}
			for len(m.layers) < 6 {
				m.freeze()
				m.step()
			}
			expectDisk(t, m.disk, m.flat)
			m.replay()
			expectDisk(t, m.disk, m.flat)
		})
	}
}

// C4: clones over one base see their own writes and never each other's, and
// the base's bytes stay as they were.
func TestDiskClonesC4(t *testing.T) {
	base := filled(64 * UnitSize)
	parent := newDisk(t, DiskConfig{Size: int64(len(base)), Layers: []*Layer{rawLayer(t, base)}})
	if _, err := parent.WriteAt([]byte("parent"), 100); err != nil {
		t.Fatal(err)
	}
	step := must(parent.Freeze(newTop(t)))(t)
	defer step.Close()
	frozen := bytes.Clone(base)
	copy(frozen[100:], "parent")

	clones := make([]*Disk, 3)
	for i := range clones {
		clones[i] = newDisk(t, DiskConfig{Size: parent.Size(), Layers: []*Layer{
			must(parent.Stack()[0].Dup())(t), must(step.Dup())(t),
		}})
	}
	for i, d := range clones {
		if _, err := d.WriteAt(bytes.Repeat([]byte{byte(i)}, 5000), 4000); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := parent.WriteAt([]byte("later"), 100); err != nil {
		t.Fatal(err)
	}
	for i, d := range clones {
		want := bytes.Clone(frozen)
		copy(want[4000:], bytes.Repeat([]byte{byte(i)}, 5000))
		expectDisk(t, d, want)
	}
	fresh := newDisk(t, DiskConfig{Size: parent.Size(), ReadOnly: true, Layers: []*Layer{
		must(parent.Stack()[0].Dup())(t), must(step.Dup())(t),
	}})
	expectDisk(t, fresh, frozen)
	expectDisk(t, newDisk(t, DiskConfig{Size: parent.Size(), ReadOnly: true, Layers: []*Layer{must(parent.Stack()[0].Dup())(t)}}), base)
}

// C6: nothing outside the disk is read or written, however the range wraps.
func TestDiskRangesC6(t *testing.T) {
	const size = 10*UnitSize + 512
	base := filled(size)
	d := newDisk(t, DiskConfig{Size: size, Layers: []*Layer{rawLayer(t, base)}})
	for _, c := range []struct{ off, n int64 }{
		{-1, 1}, {size, 1}, {size - 1, 2}, {1 << 62, 512}, {1<<63 - 1, 1}, {1<<63 - 512, 512}, {-1 << 63, 0}, {size + 1, 0},
	} {
		p := make([]byte, c.n)
		if n, err := d.ReadAt(p, c.off); n != 0 || !errors.Is(err, ErrRange) {
			t.Errorf("read %d+%d: %d, %v", c.off, c.n, n, err)
		}
		if n, err := d.WriteAt(p, c.off); n != 0 || !errors.Is(err, ErrRange) {
			t.Errorf("write %d+%d: %d, %v", c.off, c.n, n, err)
		}
		if err := d.Discard(c.off, c.n); !errors.Is(err, ErrRange) {
			t.Errorf("discard %d+%d: %v", c.off, c.n, err)
		}
		if err := d.WriteZeroes(c.off, c.n); !errors.Is(err, ErrRange) {
			t.Errorf("write zeroes %d+%d: %v", c.off, c.n, err)
		}
	}
	if err := d.Discard(0, -1); !errors.Is(err, ErrRange) {
		t.Errorf("negative length: %v", err)
	}
	if err := d.WriteZeroes(512, 1<<63-1); !errors.Is(err, ErrRange) {
		t.Errorf("wrapped length: %v", err)
	}
	for _, off := range []int64{0, 77, size} {
		if n, err := d.WriteAt(nil, off); n != 0 || err != nil {
			t.Errorf("empty write at %d: %d, %v", off, n, err)
		}
	}
	expectDisk(t, d, base)
	if u := must(d.Usage())(t); u.TopBlocks != 0 || u.Layers != 1 {
		t.Errorf("usage %+v after refused requests", u)
	}
}

func TestDiskReadOnlyC6(t *testing.T) {
	base := filled(3 * UnitSize)
	d := newDisk(t, DiskConfig{Size: int64(len(base)), Layers: []*Layer{rawLayer(t, base)}, ReadOnly: true})
	if _, err := d.WriteAt(base[:1], 0); !errors.Is(err, ErrReadOnly) || !errors.Is(err, unix.EROFS) {
		t.Errorf("write: %v", err)
	}
	if err := d.Discard(0, UnitSize); !errors.Is(err, ErrReadOnly) {
		t.Errorf("discard: %v", err)
	}
	if err := d.WriteZeroes(0, 1); !errors.Is(err, ErrReadOnly) {
		t.Errorf("write zeroes: %v", err)
	}
	top := tempFile(t)
	if _, err := d.Freeze(top); !errors.Is(err, ErrReadOnly) {
		t.Errorf("freeze: %v", err)
	}
	if err := d.Flush(); err != nil {
		t.Errorf("flush: %v", err)
	}
	expectDisk(t, d, base)
}

// C6: sizes beyond 2 TiB, sparse.
func TestDiskBeyond2TiBC6(t *testing.T) {
	const size = 3<<40 + 512
	f := tempFile(t)
	if err := f.Truncate(2<<40 + 512); err != nil {
		t.Skip("file system has no files of 2 TiB:", err)
	}
	base := must(OpenRaw(must(dupFile(f))(t)))(t)
	d := newDisk(t, DiskConfig{Size: size, Layers: []*Layer{base}})
	for _, off := range []int64{0, 2 << 40, 2<<40 + 300, size - 512} {
		p := filled(512)
		if _, err := d.WriteAt(p, off); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 512)
		if _, err := d.ReadAt(got, off); err != nil || !bytes.Equal(got, p) {
			t.Errorf("at %d: %v", off, err)
		}
	}
	if err := d.Discard(0, size); err != nil {
		t.Fatal(err)
	}
	u := must(d.Usage())(t)
	if u.TopBlocks != 0 || u.IndexBytes > 64<<20 {
		t.Errorf("usage after discarding all: %+v", u)
	}
	l := must(d.Freeze(newTop(t)))(t)
	defer l.Close()
	want := []Extent{{0, (2<<40)/UnitSize + 1, ZeroExtent}, {(size - 1) / UnitSize, 1, ZeroExtent}}
	if got := l.Extents(); len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("extents %v, want %v", got, want)
	}
}

func TestDiskConfigRefusals(t *testing.T) {
	ctx := context.Background()
	small := rawLayer(t, filled(2*UnitSize))
	defer small.Close()
	memory := sealGolden(t, memfd(t), false)
	used := writeFile(t, []byte{1})
	for name, c := range map[string]DiskConfig{
		"no size":         {Top: tempFile(t)},
		"odd size":        {Size: 513, Top: tempFile(t)},
		"negative size":   {Size: -512, Top: tempFile(t)},
		"huge size":       {Size: 1<<63 - 512, Top: tempFile(t)},
		"no top":          {Size: 512},
		"used top":        {Size: 512, Top: used},
		"larger layer":    {Size: UnitSize, Layers: []*Layer{small}, Top: tempFile(t)},
		"part of a block": {Size: 2*UnitSize - 512, Layers: []*Layer{small}, Top: tempFile(t)},
		"memory pages":    {Size: 1 << 20, Layers: []*Layer{memory}, Top: tempFile(t)},
	} {
		if _, err := NewDisk(c); !errors.Is(err, snapshot.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What was refused still belongs to the caller.
	if _, err := small.RawChecksum(ctx); err != nil {
		t.Error(err)
	}
}

func TestFreezeRefusals(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 1 << 20})
	for name, top := range map[string]*os.File{"none": nil, "used": writeFile(t, []byte{1})} {
		if _, err := d.Freeze(top); !errors.Is(err, snapshot.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(d.Stack()) != 0 {
		t.Error("a refused freeze changed the disk")
	}
	if _, err := d.WriteAt(filled(10), 10); err != nil {
		t.Error(err)
	}
}

func TestDiskClosed(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 1 << 20})
	if err := errors.Join(d.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 1)
	_, readErr := d.ReadAt(p, 0)
	_, writeErr := d.WriteAt(p, 0)
	_, usageErr := d.Usage()
	for _, err := range []error{readErr, writeErr, usageErr, d.Flush(), d.Discard(0, 1), d.WriteZeroes(0, 1)} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("closed disk: %v", err)
		}
	}
}

// E4: a base image that shrinks under a disk is an error, not zeros.
func TestDiskBaseShrinks(t *testing.T) {
	f := writeFile(t, filled(8*UnitSize))
	d := newDisk(t, DiskConfig{Size: 8 * UnitSize, Layers: []*Layer{must(OpenRaw(must(dupFile(f))(t)))(t)}})
	if err := f.Truncate(2 * UnitSize); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 2*UnitSize)
	if _, err := d.ReadAt(p, UnitSize); !errors.Is(err, snapshot.ErrTruncated) {
		t.Errorf("read: %v", err)
	}
	// Completing a partial block from what is gone must fail, too.
	if n, err := d.WriteAt(p[:10], 5*UnitSize); n != 0 || !errors.Is(err, snapshot.ErrTruncated) {
		t.Errorf("partial write: %d, %v", n, err)
	}
	if _, err := d.WriteAt(p, 4*UnitSize); err != nil {
		t.Errorf("write of whole blocks: %v", err)
	}
}

// Discarded space goes back to the file system and slots are used again; so it
// is with zeroes, whose blocks in part are written.
func TestDiscardGivesSpaceBack(t *testing.T) {
	const size = 64 << 20
	d := newDisk(t, DiskConfig{Size: size})
	data := filled(8 << 20)
	for round := range 4 {
		if _, err := d.WriteAt(data, 0); err != nil {
			t.Fatal(err)
		}
		full := must(d.Usage())(t)
		if full.TopBlocks != uint64(len(data)/UnitSize) || full.TopBytes < int64(len(data)) || full.TopBytes > int64(len(data))+1<<20 {
			t.Fatalf("usage %+v", full)
		}
		give := d.Discard
		if round%2 == 1 {
			give = d.WriteZeroes
		}
		if err := give(UnitSize/2, size-UnitSize/2); err != nil {
			t.Fatal(err)
		}
		if u := must(d.Usage())(t); u.TopBlocks != 1 || u.TopBytes > 1<<20 {
			t.Fatalf("usage %+v with half a block left", u)
		}
		first := make([]byte, UnitSize)
		if _, err := d.ReadAt(first, 0); err != nil || !bytes.Equal(first[:UnitSize/2], data[:UnitSize/2]) {
			t.Fatalf("what was in front is not as it was, %v", err)
		}
		if zeroed := bytes.Equal(first[UnitSize/2:], make([]byte, UnitSize/2)); zeroed != (round%2 == 1) {
			t.Errorf("half a block in front: zero %v", zeroed)
		}
		if err := d.Discard(0, size); err != nil {
			t.Fatal(err)
		}
		if u := must(d.Usage())(t); u.TopBlocks != 0 || u.TopBytes > 1<<20 {
			t.Fatalf("usage after discard %+v", u)
		}
	}
	if st := must(d.files.top.Stat())(t); st.Size() > int64(len(data))+UnitSize {
		t.Errorf("top grew to %d bytes: slots were not used again", st.Size())
	}
}

// Requests of many goroutines, with freezes between, for the race detector;
// each goroutine owns a part of the disk and must see exactly its own writes.
func TestDiskConcurrent(t *testing.T) {
	const workers, part = 6, 48*UnitSize + 512
	d := newDisk(t, DiskConfig{Size: workers * part, Layers: []*Layer{rawLayer(t, make([]byte, workers*part))}})
	var wg sync.WaitGroup
	flat := make([]byte, workers*part)
	for w := range workers {
		r := rand.New(rand.NewPCG(uint64(w), 7))
		mine := flat[w*part : (w+1)*part]
		wg.Go(func() {
			for range 400 {
				off := r.IntN(part)
				n := r.IntN(min(part-off, 3*UnitSize) + 1)
				at := int64(w*part + off)
				switch r.IntN(4) {
				case 0, 1:
					p := filled(n)
					if _, err := d.WriteAt(p, at); err != nil {
						t.Error(err)
					}
					copy(mine[off:], p)
				case 2:
					if err := d.WriteZeroes(at, int64(n)); err != nil {
						t.Error(err)
					}
					clear(mine[off : off+n])
				default:
					p := make([]byte, n)
					if _, err := d.ReadAt(p, at); err != nil {
						t.Error(err)
					}
					if !bytes.Equal(p, mine[off:off+n]) {
						t.Error("read something else than what was written")
					}
				}
			}
		})
	}
	wg.Go(func() {
		for range 40 {
			l, err := d.Freeze(newTop(t))
			if err != nil {
				t.Error(err)
				return
			}
			if err := l.Seal(); err != nil {
				t.Error(err)
			}
			compact(t, d)
			if err := errors.Join(d.Flush(), l.Close()); err != nil {
				t.Error(err)
			}
			d.Stack()
			if _, err := d.Usage(); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	expectDisk(t, d, flat)
}

// deepDisk is a disk of size bytes under depth layers, each with some blocks.
func deepDisk(t testing.TB, size int64, depth int, reopen bool) *Disk {
	d := newDisk(t, DiskConfig{Size: size})
	r := rand.New(rand.NewPCG(1, uint64(depth)))
	perLayer := int(size) / UnitSize / depth
	block := filled(UnitSize)
	for range depth {
		for range perLayer {
			if _, err := d.WriteAt(block, r.Int64N(size/UnitSize)*UnitSize); err != nil {
				t.Fatal(err)
			}
		}
		l := must(d.Freeze(newTop(t)))(t)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if !reopen {
		return d
	}
	var stack []*Layer
	for _, l := range d.Stack() {
		stack = append(stack, must(l.Dup())(t))
	}
	return newDisk(t, DiskConfig{Size: size, Layers: stack})
}

func TestDiskDeepStack(t *testing.T) {
	const size = 4 << 20
	running := deepDisk(t, size, 50, false)
	want := make([]byte, size)
	if _, err := running.ReadAt(want, 0); err != nil {
		t.Fatal(err)
	}
	var stack []*Layer
	for _, l := range running.Stack() {
		stack = append(stack, must(l.Dup())(t))
	}
	expectDisk(t, newDisk(t, DiskConfig{Size: size, Layers: stack}), want)
}

// BenchmarkDiskRead shows that a read costs the same under one layer and under
// fifty, for a disk made from a stack and for one that grew it by freezing.
func BenchmarkDiskRead(b *testing.B) {
	const size = 64 << 20
	for _, depth := range []int{1, 50} {
		for _, how := range []string{"opened", "grown"} {
			d := deepDisk(b, size, depth, how == "opened")
			for _, n := range []int{UnitSize, 64 << 10} {
				b.Run(fmt.Sprintf("depth=%d/%s/bytes=%d", depth, how, n), func(b *testing.B) {
					r := rand.New(rand.NewPCG(3, 4))
					p := make([]byte, n)
					b.SetBytes(int64(n))
					for b.Loop() {
						if _, err := d.ReadAt(p, r.Int64N((size-int64(n))/UnitSize)*UnitSize); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

func BenchmarkDiskLookup(b *testing.B) {
	const size = 64 << 20
	for _, depth := range []int{1, 50} {
		d := deepDisk(b, size, depth, true)
		b.Run(fmt.Sprintf("depth=%d", depth), func(b *testing.B) {
			r := rand.New(rand.NewPCG(3, 4))
			for b.Loop() {
				d.lookup(r.Uint64N(size/UnitSize), 1)
			}
		})
	}
}

func BenchmarkDiskFreeze(b *testing.B) {
	p := filled(UnitSize)
	for _, blocks := range []int{10, 1000, 10_000} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			for range b.N {
				b.StopTimer()
				d := must(NewDisk(DiskConfig{Size: 1 << 30, Top: newTop(b)}))(b)
				for i := range blocks {
					if _, err := d.WriteAt(p, int64(i)*2*UnitSize); err != nil {
						b.Fatal(err)
					}
				}
				top := newTop(b)
				b.StartTimer()
				l, err := d.Freeze(top)
				b.StopTimer()
				if err := errors.Join(err, l.Close(), d.Close()); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
