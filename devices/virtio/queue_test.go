package virtio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/forkvm/forkvm/vmm/memory"
)

const testMemory = 32 << 20

func newMemory(tb testing.TB) *memory.Memory {
	tb.Helper()
	mem, err := memory.New(memory.Config{Size: testMemory})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { mem.Close() })
	return mem
}

// openQueue returns a queue that is ready, with its parts one after the other
// from address 0.
func openQueue(tb testing.TB, mem *memory.Memory, size uint16) *Queue {
	tb.Helper()
	q := newQueue(mem, 0, size, new(atomic.Int32))
	q.size, q.descriptors = size, 0
	q.driver = DescriptorSize * uint64(size)
	q.device = (q.driver + DriverRingSize(size) + 3) &^ 3
	q.indirect, q.eventIndex, q.ready = true, true, true
	if err := q.checkRing(); err != nil {
		tb.Fatal(err)
	}
	q.start()
	return q
}

func TestPassed(t *testing.T) {
	for _, c := range []struct {
		event, before, now uint16
		want               bool
	}{
		{0, 0, 1, true},
		{0, 0, 0, false},
		{1, 0, 1, false},
		{4, 4, 5, true},
		{4, 5, 6, false},
		{4, 3, 6, true},
		{6, 3, 6, false},
		{65535, 65535, 0, true},
		{65535, 65534, 65535, false},
		{0, 65535, 0, false},
		{0, 65535, 1, true},
		{0, 65534, 2, true},
		{2, 65534, 2, false},
		{32768, 0, 256, false},
	} {
		if got := passed(c.event, c.before, c.now); got != c.want {
			t.Errorf("passed(%d, %d, %d) = %v", c.event, c.before, c.now, got)
		}
	}
}

// TestPassedAgainstSteps compares with the definition: some step from before
// to now made the index go from event to event+1.
func TestPassedAgainstSteps(t *testing.T) {
	for _, before := range []uint16{0, 1, 100, 32767, 65530, 65535} {
		for steps := range uint16(12) {
			for event := before - 15; event != before+15; event++ {
				want := false
				for i := range steps {
					want = want || before+i == event
				}
				if got := passed(event, before, before+steps); got != want {
					t.Fatalf("passed(%d, %d, %d) = %v", event, before, before+steps, got)
				}
			}
		}
	}
}

func TestChainAccess(t *testing.T) {
	mem := newMemory(t)
	text := []byte("0123456789abcdef")
	if err := mem.WriteAt(text, 0x1000); err != nil {
		t.Fatal(err)
	}
	c := Chain{mem: mem}
	for _, s := range []Segment{{0x1000, 4}, {0x1008, 1}, {0x100a, 6}} {
		c.readable.add(s)
	}
	for _, s := range []Segment{{0x2000, 3}, {0x3000, 5}} {
		c.writable.add(s)
	}
	whole := []byte("01238abcdef")
	for off := range uint64(13) {
		for n := range uint64(13) {
			p := make([]byte, n)
			err := c.ReadAt(p, off)
			if inside := off+n <= 11; inside != (err == nil) {
				t.Fatalf("read %d at %d: %v", n, off, err)
			}
			var protocol *ProtocolError
			if err != nil && !errors.As(err, &protocol) {
				t.Fatalf("error is %T", err)
			}
			if err == nil && !bytes.Equal(p, whole[off:off+n]) {
				t.Fatalf("read %d at %d: %q", n, off, p)
			}
			var pieces []byte
			err = c.AccessReadable(off, n, func(p []byte) error {
				if len(p) == 0 {
					t.Error("an empty piece")
				}
				pieces = append(pieces, p...)
				return nil
			})
			if err == nil && !bytes.Equal(pieces, whole[off:off+n]) {
				t.Fatalf("access %d at %d: %q", n, off, pieces)
			}
		}
	}
	if err := c.WriteAt([]byte("xyz"), 2); err != nil {
		t.Fatal(err)
	}
	if err := c.WriteAt([]byte("xyz"), 6); err == nil {
		t.Error("wrote behind the end")
	}
	if err := c.ReadAt(make([]byte, 2), ^uint64(0)); err == nil {
		t.Error("read where the offset wraps")
	}
	got := make([]byte, 8)
	if err := mem.ReadAt(got[:3], 0x2000); err != nil {
		t.Fatal(err)
	}
	if err := mem.ReadAt(got[3:], 0x3000); err != nil {
		t.Fatal(err)
	}
	if want := []byte("\x00\x00xyz\x00\x00\x00"); !bytes.Equal(got, want) {
		t.Errorf("wrote %q, want %q", got, want)
	}
	stop := errors.New("stop")
	calls := 0
	err := c.AccessWritable(0, 8, func([]byte) error { calls++; return stop })
	if err != stop || calls != 1 {
		t.Errorf("%d calls, error %v", calls, err)
	}
}

// TestIndirectAfterDirect: section 2.7.5.3.2 has devices take ordinary
// descriptors in front of an indirect one, and ignore its write flag.
func TestIndirectAfterDirect(t *testing.T) {
	mem := newMemory(t)
	q := openQueue(t, mem, 8)
	put := func(at uint64, d descriptor) {
		if err := mem.WriteAt(encode(d), at); err != nil {
			t.Fatal(err)
		}
	}
	put(0, descriptor{0x4000, 16, DescriptorNext, 3})
	put(3*DescriptorSize, descriptor{0x8000, 2 * DescriptorSize, DescriptorIndirect | DescriptorWrite, 0})
	put(0x8000, descriptor{0x5000, 8, DescriptorNext, 1})
	put(0x8000+DescriptorSize, descriptor{0x6000, 32, DescriptorWrite, 0})
	if err := mem.WriteUint16(q.driver+ringIndex, 1); err != nil {
		t.Fatal(err)
	}
	c, err := q.Pop()
	if err != nil || c == nil {
		t.Fatal(c, err)
	}
	if c.ReadableLen() != 24 || c.WritableLen() != 32 {
		t.Errorf("%d readable, %d writable bytes", c.ReadableLen(), c.WritableLen())
	}
}

func encode(d descriptor) []byte {
	b := binary.LittleEndian.AppendUint64(nil, d.address)
	b = binary.LittleEndian.AppendUint32(b, d.length)
	b = binary.LittleEndian.AppendUint16(b, d.flags)
	return binary.LittleEndian.AppendUint16(b, d.next)
}

// TestNoNotificationIsLost lets a driver make the next chain available at all
// distances from the moment the one before is in the used ring, which is while
// the device decides that there are no more. If it did not look again after it
// has asked for a notification, both sides would wait for each other.
func TestNoNotificationIsLost(t *testing.T) {
	for _, eventIndex := range []bool{true, false} {
		mem := newMemory(t)
		q := openQueue(t, mem, 256)
		q.eventIndex = eventIndex
		kick, stop := make(chan struct{}, 1), make(chan struct{})
		done := make(chan error, 1)
		go func() { done <- serveUntil(q, kick, stop) }()

		lost := false
		for n, begin := 0, time.Now(); !lost && time.Since(begin) < 300*time.Millisecond; n++ {
			index, asked := makeAvailable(t, q, uint16(n))
			if asked {
				kick <- struct{}{}
			}
			for turn := 0; usedIndex(t, q) != index && !lost; turn++ {
				if turn%100 == 99 {
					runtime.Gosched()
				}
				lost = turn%100000 == 99999 && time.Since(begin) > 10*time.Second
			}
			for range n % 97 {
				usedIndex(t, q) // the distance
			}
		}
		close(stop)
		if err := <-done; err != nil || lost {
			t.Errorf("event index %v: lost %v, error %v", eventIndex, lost, err)
		}
	}
}

// serveUntil is a device that does nothing with its chains.
func serveUntil(q *Queue, kick, stop chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		case <-kick:
		}
		for {
			q.start()
			c, err := q.Pop()
			if err != nil {
				return err
			}
			if c == nil {
				break
			}
			if err := q.Push(c, 0); err != nil {
				return err
			}
		}
	}
}

// makeAvailable stores index n+1 and reports whether the device asked to hear
// of entry n.
func makeAvailable(t *testing.T, q *Queue, n uint16) (index uint16, asked bool) {
	if err := q.mem.WriteUint16(q.driver+ringIndex, n+1); err != nil {
		t.Fatal(err)
	}
	at := q.device + ringFlags
	if q.eventIndex {
		at = q.availEvent()
	}
	v, err := q.mem.ReadUint16(at)
	if err != nil {
		t.Fatal(err)
	}
	if q.eventIndex {
		return n + 1, v == n
	}
	return n + 1, v == 0
}

func usedIndex(t *testing.T, q *Queue) uint16 {
	v, err := q.mem.ReadUint16(q.device + ringIndex)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// FuzzQueue pops and pushes on rings full of noise. Whatever is there, chains
// stay in memory and within bounds, and the queue comes to an end.
func FuzzQueue(f *testing.F) {
	const size = 16
	mem := newMemory(f)
	ring := openQueue(f, mem, size)
	end := int(ring.device + DeviceRingSize(size))
	legal := make([]byte, end)
	copy(legal, encode(descriptor{0x1000, 64, DescriptorNext, 1}))
	copy(legal[16:], encode(descriptor{0x2000, 64, DescriptorWrite, 0}))
	legal[ring.driver+ringIndex] = 1
	f.Add(legal, uint16(0), true)
	f.Add(bytes.Repeat([]byte{0}, end), uint16(65530), true)
	f.Add(bytes.Repeat([]byte{0xff}, end), uint16(1), false)
	indirect := bytes.Clone(legal)
	copy(indirect, encode(descriptor{16, 32, DescriptorIndirect, 0}))
	f.Add(indirect, uint16(0), true)

	f.Fuzz(func(t *testing.T, noise []byte, next uint16, eventIndex bool) {
		if len(noise) > end {
			noise = noise[:end]
		}
		if err := mem.WriteAt(append(noise, make([]byte, end-len(noise))...), 0); err != nil {
			t.Fatal(err)
		}
		q := openQueue(t, mem, size)
		q.nextAvail, q.nextUsed, q.signalled = next, next, next
		q.eventIndex = eventIndex
		for range 4 * size {
			c, err := q.Pop()
			if err != nil {
				if again, e := q.Pop(); again != nil || e != err {
					t.Fatalf("popped after an error: %v, %v", again, e)
				}
				return
			}
			if c == nil {
				break
			}
			checkChain(t, mem, c)
			// A device may write anything into the chain, the ring too.
			if n := min(c.WritableLen(), 64); n > 0 {
				if err := c.WriteAt(make([]byte, n), 0); err != nil {
					t.Fatal(err)
				}
			}
			if err := q.Push(c, 1); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := q.needsInterrupt(); err != nil {
			t.Fatal(err)
		}
		if q.held != 0 || q.nextAvail != q.nextUsed {
			t.Fatalf("%d held, %d taken, %d given back", q.held, q.nextAvail, q.nextUsed)
		}
	})
}

func checkChain(t *testing.T, mem *memory.Memory, c *Chain) {
	t.Helper()
	var count int
	for _, p := range []*parts{&c.readable, &c.writable} {
		var total uint64
		for _, s := range p.segments {
			if s.Length == 0 || mem.Check(s.Address, uint64(s.Length)) != nil {
				t.Fatalf("segment %+v is not in memory", s)
			}
			total += uint64(s.Length)
			count++
		}
		if total != p.length {
			t.Fatalf("length is %d, sum is %d", p.length, total)
		}
	}
	if count > 16 {
		t.Fatalf("%d segments from a queue of 16", count)
	}
}

// BenchmarkQueue is one chain of three buffers, popped and pushed.
func BenchmarkQueue(b *testing.B) {
	for _, c := range []struct {
		name     string
		indirect bool
	}{{"direct", false}, {"indirect", true}} {
		b.Run(c.name, func(b *testing.B) {
			mem := newMemory(b)
			q := openQueue(b, mem, 256)
			table := uint64(0)
			if c.indirect {
				table = 0x10000
				if err := mem.WriteAt(encode(descriptor{table, 3 * DescriptorSize, DescriptorIndirect, 0}), 0); err != nil {
					b.Fatal(err)
				}
			}
			for i, d := range []descriptor{
				{0x20000, 16, DescriptorNext, 1},
				{0x30000, 4096, DescriptorNext | DescriptorWrite, 2},
				{0x40000, 1, DescriptorWrite, 0},
			} {
				if err := mem.WriteAt(encode(d), table+DescriptorSize*uint64(i)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				q.start()
				if err := mem.WriteUint16(q.driver+ringIndex, q.nextAvail+1); err != nil {
					b.Fatal(err)
				}
				c, err := q.Pop()
				if err != nil || c == nil {
					b.Fatal(c, err)
				}
				if err := q.Push(c, 4097); err != nil {
					b.Fatal(err)
				}
				if _, err := q.needsInterrupt(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
