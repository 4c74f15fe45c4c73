package devices

// Handler answers guest accesses to one register window. Calls come from vCPU
// threads, several at a time, so an implementation does its own locking and
// must not block on the host: the vCPU stands still meanwhile.
//
// The bus guarantees that offset+len(data) lies inside the window and that
// data is not empty; it guarantees nothing about width or alignment.
type Handler interface {
	// Read fills all of data with what the guest reads at offset.
	Read(offset uint64, data []byte)
	// Write takes what the guest wrote at offset. The slice is only valid
	// during the call.
	Write(offset uint64, data []byte)
}

// Interrupt is one interrupt line of the guest, given to a device by the
// owner of the machine.
type Interrupt interface {
	// Trigger makes one rising edge. It may be called from any goroutine.
	// An error means that the line is gone, not that the guest is busy.
	Trigger() error
}

// Device is the life of a device as the owner of the machine drives it. The
// owner calls the methods one at a time; a call that changes nothing (Pause
// when paused, Resume when running, Close when closed) succeeds and does
// nothing.
type Device interface {
	// ID is the key of this device in the saved state of a machine, for
	// example "blk0". It is unique in a machine and does not change.
	ID() string

	// Resume starts a paused device or lets it go on. Work that the guest
	// handed over before is looked for, not waited for: all queues are
	// scanned, and an interrupt that the guest has not acknowledged is
	// triggered again. An error leaves the device paused.
	Resume() error

	// Pause returns when the device does not touch guest memory, its
	// backend or its interrupt any more. Requests in flight are finished or
	// stay in the guest's queue. An error leaves the device running.
	Pause() error

	// Save returns the state of a paused device as JSON: an object with a
	// version and no host handles. It changes nothing; the device may go on
	// with Resume afterwards.
	Save() ([]byte, error)

	// Restore puts a paused device where the one was that Save was called on,
	// as the constructor does: what this device was, and what it held of the
	// host for its guest, is forgotten. What configuration brought in stays.
	// The state is hostile input; after an error the device is good for
	// nothing but Close.
	Restore(state []byte) error

	// Close ends the device and waits until all of its goroutines are gone.
	// It does not close what configuration brought in (memory, backends).
	Close() error
}
