package virtio

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"

	"github.com/forkvm/forkvm/vmm/memory"
)

// batch is how many chains a handler gets from one queue before the worker
// looks at everything else again.
const batch = 256

// Queue is the device's side of one split virtqueue (section 2.7). Only the
// transport configures it; a Device uses Pop, Push and Undo, and only in its
// handlers.
//
// Only the ring indices are kept on the host; flags, indices and event
// indices that the guest sees live in guest memory alone, so a copy of the
// guest's memory has them.
type Queue struct {
	mem   *memory.Memory
	index int
	max   uint16

	// The ring as the driver described it. Changes only while the queue is
	// not ready, and readiness changes only while no handler runs.
	size        uint16
	descriptors uint64
	driver      uint64
	device      uint64
	ready       bool

	// What was negotiated; set at activation.
	indirect   bool
	eventIndex bool

	// nextAvail and nextUsed count chains taken and given back, modulo 2^16
	// and not modulo the size.
	nextAvail uint16
	nextUsed  uint16
	// signalled is nextUsed at the last decision about an interrupt.
	signalled uint16
	// quiet: the driver was told not to notify (without event index only).
	quiet bool

	// err is the first protocol violation; nothing is popped after it.
	err error
	// preempt is the transport's: above zero, a handler should come to its
	// end. budget counts down the rest of the batch, again says that Pop
	// held chains back for either reason.
	preempt *atomic.Int32
	budget  int
	again   bool

	held int
	free []*Chain
}

func newQueue(mem *memory.Memory, index int, limit uint16, preempt *atomic.Int32) *Queue {
	return &Queue{mem: mem, index: index, max: limit, preempt: preempt}
}

// Size is the number of descriptors that the driver chose.
func (q *Queue) Size() uint16 { return q.size }

// Ready reports whether the driver has set the queue up. Pop on a queue that
// is not ready finds nothing.
func (q *Queue) Ready() bool { return q.ready }

// Pop takes the next available chain, or returns nil when there is none for
// now. Before it says so it asks the driver for a notification and looks once
// more, so no chain can be missed. It may also return nil to let a pause or a
// reset in; the worker then calls HandleQueue again by itself.
//
// An error, as a rule a *ProtocolError, is final until the driver resets the
// device.
func (q *Queue) Pop() (*Chain, error) {
	if q.err != nil || !q.ready {
		return nil, q.err
	}
	if q.budget <= 0 || q.preempt.Load() > 0 {
		q.again = true
		return nil, nil
	}
	found, err := q.find()
	if err != nil || !found {
		return nil, q.fail(err)
	}
	c, err := q.take()
	if err != nil {
		return nil, q.fail(err)
	}
	q.nextAvail++
	q.budget--
	q.held++
	return c, nil
}

// Push gives a chain back to the driver. written is the number of bytes the
// device wrote to the beginning of its writable buffers, all of them before
// this call. Whether the driver is interrupted is decided when the handler
// returns.
func (q *Queue) Push(c *Chain, written uint32) error {
	if err := q.place(c, written); err != nil {
		return err
	}
	return q.publish()
}

// PushAll is Push for several chains that the driver has to see at once: in
// the order of chains, with as many written bytes each.
func (q *Queue) PushAll(chains []*Chain, written []uint32) error {
	for i, c := range chains {
		if err := q.place(c, written[i]); err != nil {
			return err
		}
	}
	return q.publish()
}

// place writes the next used entry, which publish makes visible.
func (q *Queue) place(c *Chain, written uint32) error {
	entry := q.device + ringEntries + usedElemSize*uint64(q.nextUsed%q.size)
	var elem [usedElemSize]byte
	binary.LittleEndian.PutUint32(elem[0:], uint32(c.head))
	binary.LittleEndian.PutUint32(elem[4:], written)
	q.recycle(c)
	if err := q.mem.WriteAt(elem[:], entry); err != nil {
		return q.fail(err)
	}
	q.nextUsed++
	return nil
}

// publish stores the used index. It is what makes entries visible, so it comes
// last. It is an atomic store and with that a full barrier, which needsInterrupt
// relies on.
func (q *Queue) publish() error {
	return q.fail(q.mem.WriteUint16(q.device+ringIndex, q.nextUsed))
}

// Undo puts the chain that was popped last back, as if Pop had not been
// called.
func (q *Queue) Undo(c *Chain) {
	q.nextAvail--
	q.budget++
	q.recycle(c)
}

func (q *Queue) recycle(c *Chain) {
	q.held--
	q.free = append(q.free, c)
}

// fail remembers the first error and passes it on.
func (q *Queue) fail(err error) error {
	if err != nil && q.err == nil {
		q.err = err
	}
	return err
}

func (q *Queue) violation(format string, args ...any) error {
	return &ProtocolError{Queue: q.index, Reason: fmt.Sprintf(format, args...)}
}

// find reports whether a chain is available; when not, notifications are on.
func (q *Queue) find() (bool, error) {
	n, err := q.available()
	if err == nil && n == 0 {
		if err = q.askForKick(); err == nil {
			n, err = q.available()
		}
	}
	if err != nil || n == 0 {
		return false, err
	}
	return true, q.refuseKicks()
}

// available returns how many chains the driver has made available and the
// device has not taken.
func (q *Queue) available() (uint16, error) {
	index, err := q.mem.ReadUint16(q.driver + ringIndex)
	if err != nil {
		return 0, err
	}
	n := index - q.nextAvail
	if n > q.size {
		return 0, q.violation("available index %d is %d ahead, queue size %d", index, n, q.size)
	}
	return n, nil
}

// take copies the next head and walks its chain.
func (q *Queue) take() (*Chain, error) {
	head, err := q.mem.ReadUint16(q.driver + ringEntries + 2*uint64(q.nextAvail%q.size))
	if err != nil {
		return nil, err
	}
	c := q.chain()
	c.head = head
	if err := q.walk(c); err != nil {
		q.free = append(q.free, c)
		return nil, err
	}
	return c, nil
}

// chain returns an empty chain, an old one if there is one.
func (q *Queue) chain() *Chain {
	n := len(q.free)
	if n == 0 {
		return &Chain{mem: q.mem, queue: q.index}
	}
	c := q.free[n-1]
	q.free = q.free[:n-1]
	c.readable.reset()
	c.writable.reset()
	return c
}

// start prepares the queue for one call of a handler.
func (q *Queue) start() {
	q.budget = batch
	q.again = false
}

// reset is what a device reset leaves of the queue (section 2.4).
func (q *Queue) reset() {
	q.stop()
	q.size, q.descriptors, q.driver, q.device = 0, 0, 0, 0
}

// stop ends the use of the ring and forgets all progress, but keeps its
// description.
func (q *Queue) stop() {
	q.ready = false
	q.nextAvail, q.nextUsed, q.signalled = 0, 0, 0
	q.quiet, q.again, q.err, q.held = false, false, nil, 0
}

// checkRing reports why the ring cannot be used: its size, alignment (section
// 2.7, table 2.1) or place.
func (q *Queue) checkRing() error {
	if !validQueueSize(uint32(q.size), q.max) {
		return q.violation("size %d was never set to a power of two up to %d", q.size, q.max)
	}
	for _, part := range []struct {
		name      string
		address   uint64
		alignment uint64
		length    uint64
	}{
		{"descriptor table", q.descriptors, 16, DescriptorSize * uint64(q.size)},
		{"driver ring", q.driver, 2, DriverRingSize(q.size)},
		{"device ring", q.device, 4, DeviceRingSize(q.size)},
	} {
		if part.address%part.alignment != 0 {
			return q.violation("%s at %#x is not aligned to %d", part.name, part.address, part.alignment)
		}
		if err := q.mem.Check(part.address, part.length); err != nil {
			return q.violation("%s: %v", part.name, err)
		}
	}
	return nil
}
