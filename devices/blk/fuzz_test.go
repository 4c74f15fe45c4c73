package blk

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

// chainOf cuts readable bytes and a writable length into buffers: cuts[i]%32
// bytes each, the last one of a kind takes the rest.
func chainOf(d *virtiotest.Driver, readable []byte, writable uint32, cuts []byte) []virtiotest.Buffer {
	var buffers []virtiotest.Buffer
	cut := func(address uint64, length uint32, write bool) {
		for length > 0 {
			n := length
			if len(cuts) > 0 && len(buffers) < 100 {
				n = min(length, uint32(cuts[0])%32)
				cuts = cuts[1:]
			}
			buffers = append(buffers, virtiotest.Buffer{Address: address, Length: n, Writable: write})
			address, length = address+uint64(n), length-n
		}
	}
	out := d.Alloc(len(readable), 1)
	d.Fill(out, readable)
	cut(out, uint32(len(readable)), false)
	cut(d.Alloc(int(writable), 1), writable, true)
	return buffers
}

// FuzzBlkRequest makes requests of any content and layout. The backend checks
// that it is never called outside of its contract; a refused request changes
// nothing, and the device comes back with the request and serves another.
func FuzzBlkRequest(f *testing.F) {
	header := func(kind uint32, sector uint64, data ...byte) []byte {
		b := binary.LittleEndian.AppendUint32(nil, kind)
		b = binary.LittleEndian.AppendUint32(b, 0)
		return append(binary.LittleEndian.AppendUint64(b, sector), data...)
	}
	f.Add(header(TypeIn, 1), uint32(513), []byte{16}, false)
	f.Add(header(TypeOut, 63, make([]byte, 512)...), uint32(1), []byte{3, 13, 1}, false)
	f.Add(header(TypeOut, 1<<63, make([]byte, 512)...), uint32(1), []byte{}, false)
	f.Add(header(TypeFlush, 0), uint32(1), []byte{}, false)
	f.Add(header(TypeGetID, 0), uint32(21), []byte{}, true)
	f.Add(header(TypeDiscard, 0, ranges(sectorRange{1, 2, 0})...), uint32(1), []byte{}, false)
	f.Add(header(TypeWriteZeroes, 0, ranges(sectorRange{62, 2, 1}, sectorRange{^uint64(0), 2, 0})...), uint32(1), []byte{}, false)
	f.Add([]byte{1}, uint32(0), []byte{}, false)

	// One memory and backend each for all inputs: making them costs more than
	// a request.
	mem := virtiotest.NewMemory(f)
	f.Fuzz(func(t *testing.T, readable []byte, writable uint32, cuts []byte, readOnly bool) {
		if len(readable) > 1<<16 {
			readable = readable[:1<<16]
		}
		writable %= 1 << 16
		if len(readable) == 0 && writable == 0 {
			return
		}
		backend := newRAM(64 * SectorSize).pattern()
		before := backend.snapshot()
		irq := virtiotest.NewInterrupt()
		dev, err := New(Config{
			ID: "blk0", Memory: mem, Interrupt: irq, Backend: backend, ReadOnly: readOnly,
			OnError: func(err error) { t.Errorf("reported %v", err) },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		d := virtiotest.NewDriver(t, mem, dev, irq)
		d.Start(all)
		buffers := chainOf(d, readable, writable, cuts)
		q := d.Queues[0]
		q.Add(buffers...)
		q.Kick()
		u := q.Wait()
		if u.Written > writable {
			t.Fatalf("%d bytes written to %d", u.Written, writable)
		}
		if d.ReadRegister(virtio.RegStatus) != 15 {
			t.Fatalf("device status %#x", d.ReadRegister(virtio.RegStatus))
		}
		if writable == 0 {
			if !bytes.Equal(before, backend.snapshot()) {
				t.Fatal("a request without a status was done")
			}
			return
		}
		last := buffers[len(buffers)-1]
		status := d.Fetch(last.Address+uint64(last.Length)-1, 1)[0]
		if status > StatusUnsupported {
			t.Fatalf("status %d", status)
		}
		if (status != StatusOK || readOnly) && !bytes.Equal(before, backend.snapshot()) {
			t.Fatal("a refused request changed the disk")
		}
		if status == StatusOK && len(readable) < headerSize {
			t.Fatal("a request without a header succeeded")
		}
		next := newRequest(d, TypeFlush, 0, nil, 0)
		d.Do(q, virtiotest.Request{Buffers: next.buffers, Check: func(n uint32) error { return next.check(n, StatusOK, nil) }})
	})
}

// BenchmarkRead is one read of 4 KiB from kick to interrupt, and a share of
// 32 that are made available together.
func BenchmarkRead(b *testing.B) {
	for _, c := range []struct {
		name  string
		depth int
	}{{"4k", 1}, {"4k-depth-32", 32}} {
		b.Run(c.name, func(b *testing.B) {
			mem, irq := virtiotest.NewMemory(b), virtiotest.NewInterrupt()
			dev, err := New(Config{ID: "blk0", Memory: mem, Interrupt: irq, Backend: newRAM(1 << 20)})
			if err != nil {
				b.Fatal(err)
			}
			defer dev.Close()
			if err := dev.Resume(); err != nil {
				b.Fatal(err)
			}
			d := virtiotest.NewDriver(b, mem, dev, irq)
			d.Start(all)
			q := d.Queues[0]
			r := newRequest(d, TypeIn, 8, nil, 4096)
			b.SetBytes(4096)
			b.ReportAllocs()
			waiting := 0
			for b.Loop() {
				q.Add(r.buffers...)
				if waiting++; waiting == c.depth {
					q.Kick()
					for ; waiting > 0; waiting-- {
						q.Wait()
					}
				}
			}
		})
	}
}
