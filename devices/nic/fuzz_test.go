package nic

import (
	"testing"

	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

// FuzzTransmit sends frames of any content in buffers of any layout. What reaches the backend keeps the promises of Frame, and
// the device serves another frame afterwards.
func FuzzTransmit(f *testing.F) {
	f.Add(packed(header{}, pattern(60)), []byte{12}, uint64(all))
	f.Add(packed(header{flags: 1, segmentation: 1, headerLength: 54, segmentSize: 1460, checksumStart: 34, checksumOffset: 16}, pattern(3000)), []byte{1, 2, 3}, uint64(all))
	f.Add(packed(header{flags: 1, checksumStart: 0xfffe, checksumOffset: 0xffff}, pattern(20)), []byte{}, uint64(all))
	f.Add([]byte{0, 0, 0}, []byte{}, uint64(0))
	mem := virtiotest.NewMemory(f)
	f.Fuzz(func(t *testing.T, raw, cuts []byte, features uint64) {
		if len(raw) == 0 || len(raw) > 1<<17 {
			return
		}
		w, irq := &wire{}, virtiotest.NewInterrupt()
		dev, err := New(Config{Memory: mem, Interrupt: irq, Backend: w, MAC: testMAC})
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		b := &bench{Driver: virtiotest.NewDriver(t, mem, dev, irq), TB: t, wire: w, device: dev}
		b.Start(features)
		b.rx, b.tx = b.Queues[queueReceive], b.Queues[queueTransmit]
		at := b.Alloc(len(raw), 1)
		b.Fill(at, raw)
		b.Do(b.tx, virtiotest.Request{Buffers: cut(at, len(raw), cuts)})
		for _, frame := range w.taken() {
			check(t, frame)
		}
		b.transmit(packed(header{}, pattern(60)))
		if got := w.taken(); len(got) != 1 || sameFrame(got[0], Frame{Data: pattern(60)}) != nil {
			t.Fatalf("the next frame is %+v", got)
		}
	})
}

// cut makes buffers of cuts[i] bytes each; the last takes the rest.
func cut(at uint64, n int, cuts []byte) []virtiotest.Buffer {
	var buffers []virtiotest.Buffer
	for _, c := range cuts {
		if len(buffers) == 100 || int(c) >= n {
			break
		}
		buffers = append(buffers, virtiotest.Buffer{Address: at, Length: uint32(c)})
		at, n = at+uint64(c), n-int(c)
	}
	return append(buffers, virtiotest.Buffer{Address: at, Length: uint32(n)})
}

func check(t *testing.T, f Frame) {
	t.Helper()
	if len(f.Data) < ethernetHeader || len(f.Data) > maxFrame {
		t.Fatalf("frame of %d bytes", len(f.Data))
	}
	if f.NeedsChecksum && int(f.ChecksumStart)+int(f.ChecksumOffset)+2 > len(f.Data) {
		t.Fatalf("checksum outside of the frame: %+v", f)
	}
	if f.Segmentation != Whole && (!f.NeedsChecksum || f.SegmentSize == 0 || int(f.HeaderLength) > len(f.Data)) {
		t.Fatalf("segments that are none: %+v", f)
	}
	if f.Segmentation == Whole && len(f.Data) > ethernetHeader+vlanTag+DefaultMTU {
		t.Fatalf("frame of %d bytes on a link of %d", len(f.Data), DefaultMTU)
	}
}

// BenchmarkFrame is one frame each way, from kick to interrupt, and a share of 32 that are made available together.
func BenchmarkFrame(b *testing.B) {
	for _, c := range []struct {
		name  string
		size  int
		depth int
	}{{"1500", 1514, 1}, {"1500-depth-32", 1514, 32}, {"64k", 65000, 1}} {
		h := header{}
		if c.size > 1514 {
			h = header{flags: 1, segmentation: 1, headerLength: 54, segmentSize: 1460, checksumStart: 34, checksumOffset: 16}
		}
		b.Run("to-host/"+c.name, func(b *testing.B) {
			bench := newBench(b, all)
			bench.wire.discard = true
			p := packed(h, pattern(c.size))
			at := bench.Alloc(len(p), 1)
			bench.Fill(at, p)
			buffer := virtiotest.Buffer{Address: at, Length: uint32(len(p))}
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			waiting := 0
			for b.Loop() {
				bench.tx.Add(buffer)
				if waiting++; waiting == c.depth {
					bench.tx.Kick()
					for ; waiting > 0; waiting-- {
						bench.tx.Wait()
					}
				}
			}
		})
		b.Run("to-guest/"+c.name, func(b *testing.B) {
			bench := newBench(b, all)
			frame := Frame{Data: pattern(c.size)}
			bench.wire.mu.Lock()
			bench.wire.endless = &frame
			bench.wire.mu.Unlock()
			n := headerSize + c.size
			buffer := virtiotest.Buffer{Address: bench.Alloc(n, 1), Length: uint32(n), Writable: true}
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			waiting := 0
			for b.Loop() {
				bench.rx.Add(buffer)
				if waiting++; waiting == c.depth {
					bench.rx.Kick()
					for ; waiting > 0; waiting-- {
						bench.rx.Wait()
					}
				}
			}
		})
	}
}
