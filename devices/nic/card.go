package nic

import (
	"encoding/json"
	"sync/atomic"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
)

// card is the part behind the transport.
type card struct {
	backend Backend
	mtu     int
	wake    func() // Transport.Wake

	queues    []*virtio.Queue // nil while inactive
	mergeable bool
	fromGuest Offloads // what the guest may leave undone
	toGuest   Offloads
	frame     [headerSize + maxFrame]byte // of the guest, copied
	chains    []*virtio.Chain             // that take one frame to the guest
	written   []uint32
	counters  counters
	saved     devices.Remembered[State]
}

// batch is how many frames the guest gets before the worker looks at everything else again.
const batch = 256

func newCard(b Backend, mtu int) *card {
	return &card{
		backend: b,
		mtu:     mtu,
		chains:  make([]*virtio.Chain, 0, queueSize),
		written: make([]uint32, 0, queueSize),
	}
}

// Activate implements virtio.Device. A driver that takes segmentation without checksums has not agreed to either (5.1.3.1).
func (c *card) Activate(features uint64, queues []*virtio.Queue) error {
	c.queues = queues
	has := func(f uint64) bool { return features&f == f }
	c.mergeable = has(FeatureMergeableBuffers)
	c.fromGuest = Offloads{
		Checksum: has(FeatureChecksum),
		TCP4:     has(FeatureChecksum | FeatureHostTSO4),
		TCP6:     has(FeatureChecksum | FeatureHostTSO6),
	}
	c.toGuest = Offloads{
		Checksum: has(FeatureGuestChecksum),
		TCP4:     has(FeatureGuestChecksum | FeatureGuestTSO4),
		TCP6:     has(FeatureGuestChecksum | FeatureGuestTSO6),
	}
	c.backend.SetOffloads(c.toGuest)
	return nil
}

// HandleQueue implements virtio.Device.
func (c *card) HandleQueue(index int) error {
	if index == queueTransmit {
		return c.transmit()
	}
	return c.receive()
}

// HandleWake implements virtio.Device.
func (c *card) HandleWake() error { return c.receive() }

// Reset implements virtio.Device.
func (c *card) Reset() { c.queues = nil }

// Save implements virtio.Device.
func (c *card) Save() (json.RawMessage, error) {
	own, err := c.backend.Save()
	if err != nil {
		return nil, err
	}
	return json.Marshal(State{Version: StateVersion, MTU: c.mtu, Backend: own})
}

// Restore implements virtio.Device.
func (c *card) Restore(data json.RawMessage) error {
	s, err := c.checkState(data)
	if err != nil {
		return err
	}
	return c.backend.Restore(s.Backend)
}

// transmit takes the guest's frames.
func (c *card) transmit() error {
	queue := c.queues[queueTransmit]
	for {
		chain, err := queue.Pop()
		if chain == nil || err != nil {
			return err
		}
		err = c.take(chain)
		if e := queue.Push(chain, 0); err == nil {
			err = e
		}
		if err != nil {
			return err
		}
	}
}

// take hands one frame to the backend, or drops it. An error is one of guest memory.
func (c *card) take(chain *virtio.Chain) error {
	n := chain.ReadableLen()
	switch {
	case n < headerSize+ethernetHeader:
		c.counters.malformed.Add(1)
		return nil
	case n > uint64(len(c.frame)):
		c.counters.tooLong.Add(1)
		return nil
	}
	if err := chain.ReadAt(c.frame[:n], 0); err != nil {
		return err
	}
	var h header
	h.decode(c.frame[:headerSize])
	frame, dropped := c.check(&h, c.frame[headerSize:n])
	if dropped != nil {
		dropped.Add(1)
		return nil
	}
	c.counters.sent.Add(1)
	c.backend.Send(frame)
	return nil
}

// check compares what the guest says of a frame with the frame, and returns the counter if it does not fit.
func (c *card) check(h *header, data []byte) (frame Frame, dropped *atomic.Uint64) {
	frame.Data = data
	if h.flags&headerNeedsChecksum != 0 {
		if !c.fromGuest.Checksum || int(h.checksumStart)+int(h.checksumOffset)+2 > len(data) {
			return frame, &c.counters.lied
		}
		frame.NeedsChecksum, frame.ChecksumStart, frame.ChecksumOffset = true, h.checksumStart, h.checksumOffset
	}
	switch {
	case h.segmentation == segmentNone:
		if len(data) > ethernetHeader+vlanTag+c.mtu {
			return frame, &c.counters.tooLong
		}
		return frame, nil
	case h.segmentation == segmentTCPv4 && c.fromGuest.TCP4:
		frame.Segmentation = TCPv4
	case h.segmentation == segmentTCPv6 && c.fromGuest.TCP6:
		frame.Segmentation = TCPv6
	default:
		return frame, &c.counters.lied
	}
	if !frame.NeedsChecksum || h.segmentSize == 0 || int(h.headerLength) > len(data) {
		return frame, &c.counters.lied
	}
	frame.SegmentSize, frame.HeaderLength = h.segmentSize, h.headerLength
	return frame, nil
}

// receive gives the guest the backend's frames as long as it has buffers. Frames that are dropped take no chain, whose number
// is bounded by the queue, so they are counted here.
func (c *card) receive() error {
	if !c.queues[queueReceive].Ready() {
		return nil // the frames stay
	}
	for range batch {
		frame, ok := c.backend.Next()
		if !ok {
			return nil
		}
		if done, err := c.deliver(frame); !done || err != nil {
			return err
		}
		c.backend.Taken()
	}
	c.wake()
	return nil
}

// deliver gives the guest one frame, or drops one that it cannot take at all. Without enough buffers the frame stays.
func (c *card) deliver(frame Frame) (done bool, err error) {
	h, ok := c.describe(frame)
	if !ok {
		c.counters.undeliverable.Add(1)
		return true, nil
	}
	queue := c.queues[queueReceive]
	done, err = c.gather(queue, headerSize+uint64(len(frame.Data)))
	if err != nil || !done || len(c.chains) == 0 {
		return done, err
	}
	h.buffers = uint16(len(c.chains))
	if err := c.fill(&h, frame.Data); err != nil {
		return false, err
	}
	c.counters.received.Add(1)
	return true, queue.PushAll(c.chains, c.written)
}

// describe makes the header of a frame, unless it leaves undone what the guest has not agreed to.
func (c *card) describe(f Frame) (h header, ok bool) {
	h, ok = f.header(), true
	if f.NeedsChecksum {
		ok = c.toGuest.Checksum
	} else if c.toGuest.Checksum {
		h.flags = headerDataValid
	}
	switch f.Segmentation {
	case TCPv4:
		ok = ok && c.toGuest.TCP4
	case TCPv6:
		ok = ok && c.toGuest.TCP6
	}
	return h, ok
}

// gather takes chains until they hold n bytes. It reports true without any if they never will: the frame is dropped then, and
// the guest keeps its buffers. What it does not use it puts back.
func (c *card) gather(queue *virtio.Queue, n uint64) (bool, error) {
	c.chains, c.written = c.chains[:0], c.written[:0]
	var room uint64
	for room < n {
		if len(c.chains) == int(queue.Size()) || len(c.chains) == 1 && !c.mergeable {
			c.counters.undeliverable.Add(1)
			c.putBack(queue)
			return true, nil
		}
		chain, err := queue.Pop()
		if chain == nil || err != nil {
			c.putBack(queue)
			return false, err
		}
		if len(c.chains) == 0 && chain.WritableLen() < headerSize {
			// No place for a header: the driver gets it back empty.
			if err := queue.Push(chain, 0); err != nil {
				return false, err
			}
			continue
		}
		c.chains = append(c.chains, chain)
		room += chain.WritableLen()
	}
	return true, nil
}

// putBack undoes gather.
func (c *card) putBack(queue *virtio.Queue) {
	for len(c.chains) > 0 {
		last := len(c.chains) - 1
		queue.Undo(c.chains[last])
		c.chains = c.chains[:last]
	}
}

// fill writes a frame into the gathered chains and notes how much each got.
func (c *card) fill(h *header, data []byte) error {
	var b [headerSize]byte
	h.encode(b[:])
	if err := c.chains[0].WriteAt(b[:], 0); err != nil {
		return err
	}
	off := uint64(headerSize)
	for _, chain := range c.chains {
		n := min(uint64(len(data)), chain.WritableLen()-off)
		if err := chain.WriteAt(data[:n], off); err != nil {
			return err
		}
		c.written = append(c.written, uint32(off+n))
		data, off = data[n:], 0
	}
	return nil
}
