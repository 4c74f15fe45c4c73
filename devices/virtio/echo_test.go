package virtio_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

// all asks for every feature that is offered.
const all = ^uint64(0)

// echo is the smallest device: queue 0 copies what is readable to what is
// writable, queue 1 is never served.
type echo struct {
	queues []*virtio.Queue
	served atomic.Int64 // calls of HandleQueue
	woken  atomic.Int64 // calls of HandleWake
	resets int

	activateError error
	handleError   error
	handle        func(q *virtio.Queue) error // instead of copying
}

func (e *echo) Activate(_ uint64, queues []*virtio.Queue) error {
	e.queues = queues
	return e.activateError
}

func (e *echo) HandleQueue(index int) error {
	e.served.Add(1)
	if index != 0 {
		return nil
	}
	if e.handle != nil {
		return e.handle(e.queues[0])
	}
	for {
		c, err := e.queues[0].Pop()
		if c == nil || err != nil {
			return err
		}
		n := min(c.ReadableLen(), c.WritableLen(), 4096)
		b := make([]byte, n)
		if err := c.ReadAt(b, 0); err != nil {
			return err
		}
		if err := c.WriteAt(b, 0); err != nil {
			return err
		}
		if err := e.queues[0].Push(c, uint32(n)); err != nil {
			return err
		}
	}
}

func (e *echo) HandleWake() error {
	e.woken.Add(1)
	return e.handleError
}

func (e *echo) Reset() { e.resets++ }

func (e *echo) Save() (json.RawMessage, error) { return json.RawMessage(`{"version":1}`), nil }

func (e *echo) Restore(state json.RawMessage) error {
	if string(state) != `{"version":1}` {
		return errors.New("not the state of an echo device")
	}
	return nil
}

// echoSpace is the device's configuration space.
var echoSpace = []byte("0123456789")

func echoConfig(e *echo, mem *memory.Memory, irq devices.Interrupt, state []byte) virtio.Config {
	return virtio.Config{
		ID:         "echo0",
		DeviceID:   42,
		Features:   0x5,
		QueueSizes: []uint16{64, 4},
		Space:      echoSpace,
		Memory:     mem,
		Interrupt:  irq,
		Device:     e,
		State:      state,
	}
}

// echoRequest has 32 bytes to copy, in two buffers each way.
func echoRequest(d *virtiotest.Driver, n int) virtiotest.Request {
	want := fmt.Appendf(nil, "request %24d", n)
	out, in := d.Alloc(32, 1), d.Alloc(32, 1)
	d.Fill(out, want)
	return virtiotest.Request{
		Buffers: []virtiotest.Buffer{
			{Address: out, Length: 16}, {Address: out + 16, Length: 16},
			{Address: in, Length: 5, Writable: true}, {Address: in + 5, Length: 27, Writable: true},
		},
		Check: func(written uint32) error {
			if got := d.Fetch(in, 32); written != 32 || !bytes.Equal(got, want) {
				return fmt.Errorf("got %d bytes, %q, want %q", written, got, want)
			}
			return nil
		},
	}
}

func TestContract(t *testing.T) {
	virtiotest.Run(t, func(testing.TB) virtiotest.Subject {
		return virtiotest.Subject{
			DeviceID: 42,
			New: func(mem *memory.Memory, irq devices.Interrupt, state []byte) (virtiotest.Device, error) {
				return virtio.New(echoConfig(&echo{}, mem, irq, state))
			},
			Request: echoRequest,
		}
	})
}

// setup is an echo device that is running, and a driver that has not begun.
type setup struct {
	*virtiotest.Driver
	echo      *echo
	transport *virtio.Transport
	reports   chan error
}

func newSetup(t testing.TB, change func(*virtio.Config)) *setup {
	t.Helper()
	virtiotest.CheckLeaks(t)
	s := &setup{echo: &echo{}, reports: make(chan error, 16)}
	irq := virtiotest.NewInterrupt()
	c := echoConfig(s.echo, virtiotest.NewMemory(t), irq, nil)
	c.Report = func(err error) { s.reports <- err }
	if change != nil {
		change(&c)
	}
	var err error
	if s.transport, err = virtio.New(c); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.transport.Close() })
	if err := s.transport.Resume(); err != nil {
		t.Fatal(err)
	}
	s.Driver = virtiotest.NewDriver(t, c.Memory, s.transport, irq)
	return s
}
