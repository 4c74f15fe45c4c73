package kvm

import (
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A handle owns one descriptor. Calls hold mu shared, Close holds it alone:
// a number that the process has reused is never passed to an ioctl.
type handle struct {
	mu     sync.RWMutex
	fd     int
	closed bool
	kind   string // "vm", "vcpu 3": the id in errors
}

// acquire returns the descriptor for one call; release follows unless it
// failed.
func (h *handle) acquire() (int, error) {
	h.mu.RLock()
	if h.closed {
		h.mu.RUnlock()
		return -1, os.ErrClosed
	}
	return h.fd, nil
}

func (h *handle) release() { h.mu.RUnlock() }

// close waits for calls in progress. Only the first call does anything.
func (h *handle) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	h.closed = true
	return h.wrap("close", unix.Close(h.fd))
}

// number does an ioctl whose argument is a plain number.
func (h *handle) number(nr, arg uintptr) (int, error) {
	fd, err := h.acquire()
	if err != nil {
		return 0, err
	}
	defer h.release()
	return ioctl(fd, nr, arg)
}

// wrap adds what was tried and on what. It keeps nil.
func (h *handle) wrap(verb string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s (%s): %w", verb, h.kind, err)
}

// retry repeats call while a signal interrupts it. It is for ioctls that a
// signal stops before they had an effect: the Go runtime sends itself signals
// all the time.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}
