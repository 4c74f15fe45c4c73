package virtio

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Transport is a virtio-mmio version 2 register window (section 4.2) and the
// worker behind it. It implements devices.Device and, for the bus,
// devices.Handler.
type Transport struct {
	// Fixed at construction.
	config Config
	memory *memory.Memory
	irq    devices.Interrupt
	device Device
	queues []*Queue

	// life serialises the calls of the machine's owner.
	life   sync.Mutex
	worker *worker                   // nil while paused; guarded by life
	saved  devices.Remembered[State] // guarded by life

	// work is held while a method of device runs and while anything changes
	// that the worker relies on: a queue's readiness, running. Whoever wants
	// it from a handler in progress raises preempt first, see acquire. It is
	// taken before mu.
	work    sync.Mutex
	preempt atomic.Int32
	active  bool // Activate was called, Reset not yet; guarded by work
	running bool // active and in no need of a reset; guarded by work

	// mu guards the registers and, while a queue is not ready, its
	// description.
	mu   sync.Mutex
	regs registers

	// What any thread may set and the worker takes.
	pending atomic.Uint64 // bit i: look at queue i
	woken   atomic.Bool   // call HandleWake
	wake    chan struct{} // capacity 1: there is something in the two above

	interruptStatus atomic.Uint32
	// live: the interrupt may be triggered. False while paused.
	live    atomic.Bool
	closed  atomic.Bool
	failure atomic.Pointer[error]
}

// registers is what the driver and the device wrote to the control registers;
// what belongs to a queue is in the Queue.
type registers struct {
	status            uint32
	deviceFeaturesSel uint32
	driverFeaturesSel uint32
	driverFeatures    uint64
	queueSel          uint32
	shmSel            uint32
	generation        uint32
	space             []byte
}

// New returns a paused transport, cold or, with Config.State, as it was when
// that was saved.
func New(c Config) (*Transport, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("create virtio device (%s): %w", c.ID, err)
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = defaultDrainTimeout
	}
	t := &Transport{
		config: c,
		memory: c.Memory,
		irq:    c.Interrupt,
		device: c.Device,
		wake:   make(chan struct{}, 1),
	}
	t.config.State = nil // not needed again, and possibly large
	t.regs.space = slices.Clone(c.Space)
	for i, n := range c.QueueSizes {
		t.queues = append(t.queues, newQueue(c.Memory, i, n, &t.preempt))
	}
	if c.State != nil {
		if err := t.restore(c.State); err != nil {
			return nil, fmt.Errorf("restore virtio device (%s): %w", c.ID, err)
		}
	}
	return t, nil
}

// ID returns Config.ID.
func (t *Transport) ID() string { return t.config.ID }

// Wake makes the worker call the device's HandleWake soon. It may be called
// from any goroutine, at any time, and does not block; several calls may lead
// to one HandleWake, which begins after the last of them.
func (t *Transport) Wake() {
	t.woken.Store(true)
	t.rouse()
}

// Notify tells the device that the driver has made chains available in the
// queue: what a write to QueueNotify does, for a machine that catches that
// write by other means. It does not block; a queue that is not there is
// ignored.
func (t *Transport) Notify(queue uint32) {
	if queue >= uint32(len(t.queues)) {
		return
	}
	t.pending.Or(1 << queue)
	t.rouse()
}

// rouse wakes the worker up, or leaves it a token if it is busy.
func (t *Transport) rouse() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// SetSpace replaces the device configuration space and tells the driver. The
// length stays what it was.
func (t *Transport) SetSpace(space []byte) {
	t.mu.Lock()
	// The generation changes in the same step as the content: a driver that
	// reads one generation before and after has read one content (4.2.2.1).
	copy(t.regs.space, space)
	t.regs.generation++
	announce := t.regs.status&StatusDriverOK != 0
	t.mu.Unlock()
	if announce {
		t.interrupt(InterruptConfigChange)
	}
}

// Failure returns why the device asks for a reset, or nil if it does not.
func (t *Transport) Failure() error {
	if p := t.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// interrupt makes reason visible and then triggers the line. While the device
// is paused the line stays quiet: Resume triggers it for what is visible then.
func (t *Transport) interrupt(reason uint32) {
	t.interruptStatus.Or(reason)
	if !t.live.Load() {
		return
	}
	if err := t.irq.Trigger(); err != nil {
		t.report(fmt.Errorf("trigger interrupt (%s): %w", t.config.ID, err))
	}
}

func (t *Transport) report(err error) {
	if t.config.Report != nil {
		t.config.Report(err)
	}
}

// acquire takes the work lock and lets a handler in progress know that it
// should come to its end after the request it is at.
func (t *Transport) acquire() {
	t.preempt.Add(1)
	t.work.Lock()
	t.preempt.Add(-1)
}

// fail stops the device until the driver resets it (section 2.1.2). The work
// lock is held, mu is not.
func (t *Transport) fail(err error) {
	t.running = false
	t.failure.Store(&err)
	t.mu.Lock()
	t.regs.status |= StatusNeedsReset
	announce := t.regs.status&StatusDriverOK != 0
	t.mu.Unlock()
	t.report(fmt.Errorf("stop virtio device (%s): %w", t.config.ID, err))
	// A driver that is not there yet is told when it sets DRIVER_OK.
	if announce {
		t.interrupt(InterruptConfigChange)
	}
}
