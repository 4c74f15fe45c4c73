package nic

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

const all = ^uint64(0)

var testMAC = MAC{2, 0, 0, 0, 0, 1}

// wire is a backend that keeps what the guest sent and has what it is given for the guest.
type wire struct {
	mu       sync.Mutex
	wake     func()
	sent     []Frame
	discard  bool // count, do not keep
	count    int
	queue    []Frame
	endless  *Frame // always there, for the guest
	offloads []Offloads
	state    string
}

func (w *wire) Attach(wake func()) { w.wake = wake }

func (w *wire) SetOffloads(o Offloads) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.offloads = append(w.offloads, o)
}

func (w *wire) Send(f Frame) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count++
	if w.discard {
		return
	}
	f.Data = slices.Clone(f.Data)
	w.sent = append(w.sent, f)
}

func (w *wire) Next() (Frame, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.endless != nil {
		return *w.endless, true
	}
	if len(w.queue) == 0 {
		return Frame{}, false
	}
	return w.queue[0], true
}

func (w *wire) Taken() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.endless == nil {
		w.queue = w.queue[1:]
	}
}

func (w *wire) Save() (json.RawMessage, error) {
	if w.state == "" {
		return nil, nil
	}
	return json.Marshal(w.state)
}

func (w *wire) Restore(data json.RawMessage) error {
	w.mu.Lock()
	w.queue = nil
	w.mu.Unlock()
	w.state = ""
	if data == nil {
		return nil
	}
	return json.Unmarshal(data, &w.state)
}

// give puts frames in front of the guest.
func (w *wire) give(frames ...Frame) {
	w.mu.Lock()
	w.queue = append(w.queue, frames...)
	w.mu.Unlock()
	w.wake()
}

func (w *wire) taken() []Frame {
	w.mu.Lock()
	defer w.mu.Unlock()
	sent := w.sent
	w.sent = nil
	return sent
}

func (w *wire) left() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue)
}

// bench is a running device with a started driver.
type bench struct {
	*virtiotest.Driver
	testing.TB
	wire   *wire
	device *Device
	rx, tx *virtiotest.Queue
}

func newBench(t testing.TB, want uint64) *bench {
	t.Helper()
	virtiotest.CheckLeaks(t)
	w, irq := &wire{}, virtiotest.NewInterrupt()
	mem := virtiotest.NewMemory(t)
	dev, err := New(Config{Memory: mem, Interrupt: irq, Backend: w, MAC: testMAC})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	if err := dev.Resume(); err != nil {
		t.Fatal(err)
	}
	b := &bench{Driver: virtiotest.NewDriver(t, mem, dev, irq), TB: t, wire: w, device: dev}
	b.Start(want)
	b.rx, b.tx = b.Queues[queueReceive], b.Queues[queueTransmit]
	return b
}

// transmit sends bytes, header included, and waits until the device has given them back.
func (b *bench) transmit(p []byte) {
	b.Helper()
	at := b.Alloc(len(p), 1)
	b.Fill(at, p)
	b.Do(b.tx, virtiotest.Request{
		Buffers: []virtiotest.Buffer{{Address: at, Length: uint32(len(p))}},
		Check: func(n uint32) error {
			if n != 0 {
				return fmt.Errorf("%d bytes written", n)
			}
			return nil
		},
	})
}

// offer gives the device empty buffers of these sizes and returns them.
func (b *bench) offer(sizes ...int) []virtiotest.Buffer {
	b.Helper()
	var buffers []virtiotest.Buffer
	for _, n := range sizes {
		buffer := virtiotest.Buffer{Address: b.Alloc(n, 1), Length: uint32(n), Writable: true}
		b.rx.Add(buffer)
		buffers = append(buffers, buffer)
	}
	b.rx.ForceKick()
	return buffers
}

// collect returns the next frame for the guest, from as many of the buffers as it says.
func (b *bench) collect(buffers []virtiotest.Buffer) (h header, data []byte, used int) {
	b.Helper()
	u := b.rx.Wait()
	first := b.Fetch(buffers[0].Address, int(u.Written))
	h.decode(first)
	data = first[headerSize:]
	for used = 1; used < int(h.buffers); used++ {
		// All of them are there when the first is.
		u, ok := b.rx.Poll()
		if !ok {
			b.Fatalf("buffer %d of %d is not there", used, h.buffers)
		}
		data = append(data, b.Fetch(buffers[used].Address, int(u.Written))...)
	}
	return h, data, used
}

func (b *bench) eventually(what string, done func() bool) {
	b.Helper()
	for end := time.Now().Add(20 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("never: %s", what)
		}
	}
}

// pattern is a frame of n bytes.
func pattern(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7 + i>>8)
	}
	return p
}

func packed(h header, data []byte) []byte {
	b := make([]byte, headerSize, headerSize+len(data))
	h.encode(b)
	return append(b, data...)
}

func sameFrame(got, want Frame) error {
	if !bytes.Equal(got.Data, want.Data) {
		return fmt.Errorf("%d bytes %.20x…, want %d bytes %.20x…", len(got.Data), got.Data, len(want.Data), want.Data)
	}
	got.Data, want.Data = nil, nil
	if got.NeedsChecksum != want.NeedsChecksum || got.ChecksumStart != want.ChecksumStart || got.ChecksumOffset != want.ChecksumOffset ||
		got.Segmentation != want.Segmentation || got.SegmentSize != want.SegmentSize || got.HeaderLength != want.HeaderLength {
		return fmt.Errorf("described as %+v, want %+v", got, want)
	}
	return nil
}

var errNoReset = errors.New("the device asks for a reset")

// alive says whether the device still follows its driver.
func (b *bench) alive() error {
	if b.ReadRegister(virtio.RegStatus)&virtio.StatusNeedsReset != 0 {
		return errNoReset
	}
	return nil
}
