package vmm

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/kvm"
)

// line is an edge-triggered interrupt of the in-kernel interrupt controller. A
// write to the event counter makes one edge on the GSI (KVM_IRQFD); KVM injects
// it without a further exit or call.
//
// The descriptor is used with plain system calls: a write to an event counter
// never blocks, so the Go poller would only add to the cost of a create.
type line struct {
	gsi uint32
	fd  int
}

var _ devices.Interrupt = (*line)(nil)

// Interrupt returns the line of a global system interrupt, for the device that
// is wired to it. Call it once per GSI, before Start. The line lives until the
// machine is closed; Trigger may be called from any goroutine.
func (m *Machine) Interrupt(gsi uint32) (devices.Interrupt, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase == phaseClosed {
		return nil, ErrClosed
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("create eventfd (gsi %d): %w", gsi, err)
	}
	if err := m.vm.AssignIRQFD(kvm.IRQFD{FD: fd, GSI: gsi}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("assign irqfd (gsi %d): %w", gsi, err)
	}
	l := &line{gsi: gsi, fd: fd}
	m.lines = append(m.lines, l)
	return l, nil
}

// Trigger makes one edge.
func (l *line) Trigger() error {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	if _, err := unix.Write(l.fd, one[:]); err != nil {
		return fmt.Errorf("trigger interrupt (gsi %d): %w", l.gsi, err)
	}
	return nil
}

// close may only be called when no device can trigger the line any more.
func (l *line) close() error { return unix.Close(l.fd) }
