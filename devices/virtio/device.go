package virtio

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Device is the part of a virtio device behind the transport: what block,
// entropy and vsock do not have in common.
//
// The transport calls one method at a time and never two at once, so a
// Device needs no lock for what only these methods touch. HandleQueue and
// HandleWake come from the worker goroutine; Activate and Reset come from the
// vCPU thread that wrote the status register, or from New.
type Device interface {
	// Activate tells what was negotiated when the driver has set DRIVER_OK,
	// or when a device is restored that had been active. The queues stay the
	// same objects for the life of the transport. Activate must not touch
	// them yet: the worker calls HandleQueue for each queue afterwards. An
	// error marks the device as needing a reset.
	Activate(features uint64, queues []*Queue) error

	// HandleQueue serves everything available in the queue: it calls Pop
	// until that returns no chain and Push for each chain. (A queue whose
	// chains wait for the host's data may be popped only as needed; then this
	// is the time to look whether data waits.) Each popped chain
	// must be pushed or returned with Undo before HandleQueue returns; a
	// chain is what a pause waits for. It is also called without any
	// notification (after Activate and Resume), and may find nothing.
	//
	// An error from a Queue or Chain is passed up unchanged. Any error marks
	// the device as needing a reset; a request that merely failed is
	// answered in the device's own protocol instead.
	HandleQueue(index int) error

	// HandleWake serves the device's own events after Transport.Wake, under
	// the same rules as HandleQueue. It is also called once after each Resume
	// and Activate.
	HandleWake() error

	// Reset forgets what belongs to the driver. Queues must not be used
	// until the next Activate.
	Reset()

	// Save returns the device's own part of the state, nil for none. It is
	// called while the transport is paused.
	Save() (json.RawMessage, error)

	// Restore takes what Save returned, before Activate and before any
	// other method, or after Reset. The bytes are hostile input.
	Restore(state json.RawMessage) error
}

// SpaceDevice is a Device whose configuration space is part of its state. Space is
// called after Restore and returns as many bytes as Config.Space has.
type SpaceDevice interface {
	Device
	Space() []byte
}

// Config is what a Transport is made of.
type Config struct {
	// ID names the device in saved states, reports and errors ("blk0").
	ID string
	// DeviceID is the virtio device type, for example DeviceBlock.
	DeviceID uint32
	// Features are the device's own feature bits, 0 to 23.
	Features uint64
	// QueueSizes has the largest allowed size of each queue: powers of two,
	// at most MaxQueueSize; at most 64 queues.
	QueueSizes []uint16
	// Space is the initial content of the device configuration space.
	Space []byte
	// Memory is the guest's RAM.
	Memory *memory.Memory
	// Interrupt is the device's line to the guest.
	Interrupt devices.Interrupt
	// Device is the part behind the transport.
	Device Device
	// DrainTimeout is how long Pause waits for the request in flight; zero
	// means ten seconds.
	DrainTimeout time.Duration
	// Report, if not nil, is told when the device stops because its driver
	// broke the protocol, and when the interrupt line fails. It is called
	// with the device locked: it must be quick and must not call back. A
	// hostile guest decides how often.
	Report func(error)
	// State is what Save returned, nil for a cold device.
	State []byte
}

const (
	defaultDrainTimeout = 10 * time.Second
	maxQueues           = 64
	maxSpace            = WindowSize - RegConfig
)

// check refuses configurations that no guest is to blame for.
func (c *Config) check() error {
	switch {
	case c.Memory == nil || c.Interrupt == nil || c.Device == nil:
		return fmt.Errorf("memory, interrupt and device must be given")
	case c.Features&^deviceFeatureMask != 0:
		return fmt.Errorf("feature bits %#x belong to the transport", c.Features&^deviceFeatureMask)
	case len(c.QueueSizes) == 0 || len(c.QueueSizes) > maxQueues:
		return fmt.Errorf("%d queues, not 1 to %d", len(c.QueueSizes), maxQueues)
	case len(c.Space) > maxSpace:
		return fmt.Errorf("configuration space of %d bytes, at most %d", len(c.Space), maxSpace)
	}
	for i, n := range c.QueueSizes {
		if !validQueueSize(uint32(n), MaxQueueSize) {
			return fmt.Errorf("queue %d has size %d, not a power of two", i, n)
		}
	}
	return nil
}

// validQueueSize reports whether n is a size that a driver may choose for a
// queue of at most limit entries (section 2.7).
func validQueueSize(n uint32, limit uint16) bool {
	return n != 0 && n <= uint32(limit) && n&(n-1) == 0
}
