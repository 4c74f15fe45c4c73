package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Event is an eventfd(2): a counter that one side adds to and the other waits
// for. Safe for concurrent use.
type Event struct{ file *os.File }

// NewEvent creates an event with count zero. The descriptor is non-blocking and
// close-on-exec; Wait uses the runtime's poller, so that Close ends it.
func NewEvent() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("create event: %w", err)
	}
	return &Event{file: os.NewFile(uintptr(fd), "eventfd")}, nil
}

// File is the descriptor, to hand to KVM (irqfd, ioeventfd) or another
// process. It stays owned by the event. Use Descriptor for the number: os.File's
// Fd would switch the descriptor to blocking mode.
func (e *Event) File() *os.File { return e.file }

// Descriptor returns the descriptor's number, valid until Close.
func (e *Event) Descriptor() (int, error) {
	fd, err := descriptor(e.file)
	if err != nil {
		return -1, fmt.Errorf("use event: %w", err)
	}
	return fd, nil
}

// Signal adds one to the count. After Close it returns an error that wraps
// os.ErrClosed.
func (e *Event) Signal() error {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	if _, err := e.file.Write(one[:]); err != nil {
		return fmt.Errorf("signal event: %w", err)
	}
	return nil
}

// Wait blocks until the count is above zero, takes all of it and returns it.
// After Close it returns an error that wraps os.ErrClosed.
func (e *Event) Wait() (uint64, error) {
	var count [8]byte
	if _, err := e.file.Read(count[:]); err != nil {
		return 0, fmt.Errorf("wait for event: %w", err)
	}
	return binary.NativeEndian.Uint64(count[:]), nil
}

// Close closes the descriptor and wakes a waiter; idempotent.
func (e *Event) Close() error {
	if err := e.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close event: %w", err)
	}
	return nil
}
