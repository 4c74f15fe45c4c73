package vmm

import (
	"sync"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/kvm"
)

// line is an edge-triggered interrupt of the in-kernel interrupt controller.
//
// It is raised by two calls (KVM_IRQ_LINE), after which it is in the controller.
// A signal on an event descriptor (KVM_IRQFD) is one call, but a thread of the
// kernel's has to wake up for every edge of a line, which takes many times as long
// and ends some time after the pause that it was sent before.
type line struct {
	gsi uint32
	vm  *kvm.VM
	// mu is held from the rise to the fall: an edge that would begin in between is
	// none.
	mu sync.Mutex
}

var _ devices.Interrupt = (*line)(nil)

// Interrupt returns the line of a global system interrupt, for the device that
// is wired to it. Trigger may be called from any goroutine until the machine is
// closed.
func (m *Machine) Interrupt(gsi uint32) devices.Interrupt { return &line{gsi: gsi, vm: m.vm} }

// Trigger makes one edge.
func (l *line) Trigger() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.vm.IRQLine(l.gsi, true); err != nil {
		return err
	}
	return l.vm.IRQLine(l.gsi, false)
}
