package vsock

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

// F1: packets that make no sense end at most their connection.
func TestHostilePackets(t *testing.T) {
	open := func(h *header) {}
	for name, change := range map[string]func(*header){
		"more data than there is":  func(h *header) { h.operation, h.length = opData, 1000 },
		"far more data":            func(h *header) { h.operation, h.length = opData, 0xffffffff },
		"unknown operation":        func(h *header) { h.operation = 99 },
		"operation 0":              func(h *header) { h.operation = 0 },
		"second request":           func(h *header) { h.operation = opRequest },
		"response without request": func(h *header) { h.operation = opResponse },
		"foreign sender":           func(h *header) { h.operation, h.sourceCID = opReset, 4 },
		"huge sender":              func(h *header) { h.operation, h.sourceCID = opReset, 3|1<<40 },
		"other destination":        func(h *header) { h.operation, h.destinationCID = opData, 4 },
		"seqpacket":                func(h *header) { h.operation, h.socketType = opData, 2 },
		"nothing":                  open,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, nil)
			s, conn := b.toHost()
			defer conn.Close()
			bystander, other := b.toHost()
			defer other.Close()
			h := header{sourceCID: 3, destinationCID: 2, sourcePort: s.ports.guest, destinationPort: servedPort, socketType: typeStream,
				operation: opCreditUpdate, bufferSize: 1 << 18}
			change(&h)
			b.guest.mu.Lock()
			b.guest.transmit(h, []byte("data"))
			b.guest.mu.Unlock()
			exchange(b, bystander, other, 10_000, 1000, 0)
			b.works()
			if err := b.device.Failure(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("more than its credit", func(t *testing.T) {
		b := newBench(t, nil)
		s, conn := b.toHost()
		defer conn.Close()
		b.guest.mu.Lock()
		for range 40 {
			s.send(opData, 0, make([]byte, maxPacketData))
		}
		b.guest.wait(func() bool { return s.state == guestGone })
		b.guest.mu.Unlock()
		b.works()
	})
	t.Run("header in single bytes", func(t *testing.T) {
		b := newBench(t, nil)
		s, conn := b.toHost()
		defer conn.Close()
		b.guest.mu.Lock()
		var raw [headerSize]byte
		(&header{sourceCID: 3, destinationCID: 2, sourcePort: s.ports.guest, destinationPort: servedPort, length: 3, socketType: typeStream,
			operation: opData, bufferSize: 1 << 18}).encode(&raw)
		p := append(raw[:], "abc"...)
		address := b.guest.d.Alloc(len(p), 1)
		b.guest.d.Fill(address, p)
		var buffers []virtiotest.Buffer
		for i := range p {
			buffers = append(buffers, virtiotest.Buffer{Address: address + uint64(i), Length: 1})
		}
		b.guest.queues[queueTransmit].Add(buffers...)
		b.guest.queues[queueTransmit].Kick()
		b.guest.mu.Unlock()
		got := make([]byte, 3)
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != "abc" {
			t.Errorf("%q, %v", got, err)
		}
	})
	// The guest sends and sends and takes no answer: its packets wait in its ring, the device does not grow.
	t.Run("no buffers for answers", func(t *testing.T) {
		b := newBench(t, nil)
		b.guest.halt()
		b.guest.boot(allFeatures &^ virtio.FeatureEventIndex)
		d := b.guest.d
		d.Start(allFeatures)
		q := d.Queues[queueTransmit]
		var raw [headerSize]byte
		(&header{sourceCID: 3, destinationCID: 2, destinationPort: 1, socketType: typeStream, operation: opData}).encode(&raw)
		address := d.Alloc(headerSize, 8)
		d.Fill(address, raw[:])
		head := q.Add(virtiotest.Buffer{Address: address, Length: headerSize})
		q.ForceKick()
		sent := 1
		b.eventually("it takes no more, and the ring is full", func() bool {
			for uint16(sent)-q.UsedIndex() < q.Size {
				q.Publish(head)
				sent++
				q.ForceKick()
			}
			return q.UsedIndex() >= maxReplies
		})
		time.Sleep(20 * time.Millisecond) // for what would be too much
		if used := int(q.UsedIndex()); used != maxReplies {
			t.Errorf("%d packets taken, want %d", used, maxReplies)
		}
		// With buffers it goes on.
		rx := d.Queues[queueReceive]
		for range rx.Size {
			rx.Add(virtiotest.Buffer{Address: d.Alloc(64, 8), Length: 64, Writable: true})
		}
		rx.ForceKick()
		for range rx.Size {
			rx.Wait()
		}
		for range maxReplies {
			rx.Add(virtiotest.Buffer{Address: address, Length: 0, Writable: true}, virtiotest.Buffer{Address: d.Alloc(64, 8), Length: 64, Writable: true})
			rx.Kick()
			rx.Wait()
		}
		b.eventually("the rest is taken", func() bool { return int(q.UsedIndex()) == sent })
		b.guest.boot(allFeatures)
		b.guest.run()
		b.works()
	})
}

// FuzzPackets feeds the device with packets from a guest, cut into buffers of any size.
func FuzzPackets(f *testing.F) {
	valid := func(op operation, length uint32) []byte {
		var raw [headerSize]byte
		(&header{sourceCID: 3, destinationCID: 2, sourcePort: 1 << 20, destinationPort: servedPort, length: length, socketType: typeStream,
			operation: op, flags: 3, bufferSize: 1 << 16}).encode(&raw)
		return append(raw[:], make([]byte, length)...)
	}
	for op := operation(0); op < 9; op++ {
		f.Add(append(valid(opRequest, 0), valid(op, 3)...), uint8(7))
	}
	f.Add(valid(opData, 0)[:20], uint8(1))
	f.Fuzz(func(t *testing.T, input []byte, split uint8) {
		mem, irq := virtiotest.NewMemory(t), virtiotest.NewInterrupt()
		device, err := New(Config{Memory: mem, Interrupt: irq, DialHost: func(context.Context, uint32) (net.Conn, error) {
			one, other, err := Pipe()
			if err == nil {
				other.Close()
			}
			return one, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer device.Close()
		if err := device.Resume(); err != nil {
			t.Fatal(err)
		}
		d := virtiotest.NewDriver(t, mem, device, irq)
		d.Start(allFeatures)
		for range 32 {
			d.Queues[queueReceive].Add(virtiotest.Buffer{Address: d.Alloc(100, 1), Length: 100, Writable: true})
		}
		tx := d.Queues[queueTransmit]
		for range 8 {
			if len(input) == 0 {
				break
			}
			n := min(len(input), headerSize+int(input[0])%8)
			address := d.Alloc(n, 1)
			d.Fill(address, input[:n])
			input = input[n:]
			var buffers []virtiotest.Buffer
			for n > 0 && len(buffers) < 15 {
				part := min(n, 1+int(split)%64)
				buffers = append(buffers, virtiotest.Buffer{Address: address, Length: uint32(part)})
				address, n = address+uint64(part), n-part
			}
			tx.Add(buffers...)
			tx.ForceKick()
			if tx.Wait(); device.Failure() != nil {
				t.Fatal(device.Failure())
			}
		}
	})
}

// FuzzState restores from any bytes.
func FuzzState(f *testing.F) {
	d, err := New(Config{Memory: virtiotest.NewMemory(f), Interrupt: virtiotest.NewInterrupt()})
	if err != nil {
		f.Fatal(err)
	}
	state, err := d.Save()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(state)
	f.Add([]byte(strings.Replace(string(state), `"active":false`, `"active":true,"unhandled_resets":3,"connections":[{"host_port":1,"guest_port":2}]`, 1)))
	mem := virtiotest.NewMemory(f)
	f.Fuzz(func(t *testing.T, state []byte) {
		d, err := New(Config{Memory: mem, Interrupt: virtiotest.NewInterrupt(), State: state})
		if err != nil {
			return
		}
		for _, err := range []error{d.Resume(), d.Pause(), d.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	})
}
