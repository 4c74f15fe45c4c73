package rng

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"testing/iotest"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

func TestContract(t *testing.T) {
	virtiotest.Run(t, func(testing.TB) virtiotest.Subject {
		return virtiotest.Subject{
			DeviceID: virtio.DeviceEntropy,
			New: func(mem *memory.Memory, irq devices.Interrupt, state []byte) (virtiotest.Device, error) {
				return New(Config{ID: "rng0", Memory: mem, Interrupt: irq, State: state})
			},
			Request: func(d *virtiotest.Driver, n int) virtiotest.Request { return request(d, 64+n%3) },
		}
	})
}

// request asks for n bytes in two buffers and expects that they are not zero.
func request(d *virtiotest.Driver, n int) virtiotest.Request {
	address := d.Alloc(n, 1)
	half := uint32(n / 2)
	return virtiotest.Request{
		Buffers: []virtiotest.Buffer{
			{Address: address, Length: half, Writable: true},
			{Address: address + uint64(half), Length: uint32(n) - half, Writable: true},
		},
		Check: func(written uint32) error {
			if written != uint32(n) {
				return fmt.Errorf("%d bytes, want %d", written, n)
			}
			for at := 0; at+16 <= n; at += 16 {
				if bytes.Equal(d.Fetch(address+uint64(at), 16), make([]byte, 16)) {
					return fmt.Errorf("zeros at %d", at)
				}
			}
			return nil
		},
	}
}

func newDriver(t *testing.T, c Config) *virtiotest.Driver {
	t.Helper()
	virtiotest.CheckLeaks(t)
	irq := virtiotest.NewInterrupt()
	c.ID, c.Memory, c.Interrupt = "rng0", virtiotest.NewMemory(t), irq
	dev, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	if err := dev.Resume(); err != nil {
		t.Fatal(err)
	}
	d := virtiotest.NewDriver(t, c.Memory, dev, irq)
	d.Start(^uint64(0))
	return d
}

func TestLargeRequestIsBounded(t *testing.T) {
	d := newDriver(t, Config{})
	q := d.Queues[0]
	address := d.Alloc(1<<20, 1)
	q.Add(virtiotest.Buffer{Address: address, Length: 1 << 20, Writable: true})
	q.Kick()
	if u := q.Wait(); u.Written != maxFill {
		t.Errorf("%d bytes written, want %d", u.Written, maxFill)
	}
	if tail := d.Fetch(address+maxFill, 4096); !bytes.Equal(tail, make([]byte, 4096)) {
		t.Error("bytes behind those announced were written")
	}
}

// TestClones: two devices restored from one state on equal memory give
// different bytes.
func TestClones(t *testing.T) {
	parent := newDriver(t, Config{})
	if err := parent.Device.Pause(); err != nil {
		t.Fatal(err)
	}
	state, err := parent.Device.Save()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for range 4 {
		irq := virtiotest.NewInterrupt()
		dev, err := New(Config{ID: "rng0", Memory: parent.Memory, Interrupt: irq, State: state})
		if err != nil {
			t.Fatal(err)
		}
		// Each begins on the same, fresh rings.
		parent.Attach(dev, irq)
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		parent.Start(^uint64(0))
		address := parent.Alloc(16, 1)
		parent.Do(parent.Queues[0], virtiotest.Request{Buffers: []virtiotest.Buffer{{Address: address, Length: 16, Writable: true}}})
		seen[string(parent.Fetch(address, 16))] = true
		if err := dev.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != 4 {
		t.Errorf("4 clones got %d different values", len(seen))
	}
}

func TestSourceFails(t *testing.T) {
	broken := errors.New("no entropy")
	reports := make(chan error, 1)
	d := newDriver(t, Config{Source: iotest.ErrReader(broken), Report: func(err error) { reports <- err }})
	q := d.Queues[0]
	q.Add(virtiotest.Buffer{Address: d.Alloc(16, 1), Length: 16, Writable: true})
	q.Kick()
	if reason := d.AwaitInterrupt(); reason != virtio.InterruptConfigChange {
		t.Errorf("interrupt status is %#x", reason)
	}
	if err := <-reports; !errors.Is(err, broken) {
		t.Errorf("reported %v", err)
	}
	if q.UsedIndex() != 0 {
		t.Error("a buffer without random bytes came back")
	}
}
