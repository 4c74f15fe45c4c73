package machine

import (
	"fmt"

	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/vmm"
)

// Prepared is a virtual machine with interrupt controllers, timer and vCPUs, and
// nothing else: what of a machine does not depend on what it will run, and can be
// made before that is known.
type Prepared struct{ machine *Machine }

// Prepare makes a virtual machine for a guest with this many vCPUs. The system
// stays the caller's, who may close it.
func Prepare(system *kvm.System, cpus int) (*Prepared, error) {
	m := &Machine{shape: Shape{CPUs: cpus}}
	var err error
	m.Machine, err = vmm.New(vmm.Config{KVM: system, CPUs: cpus, Console: m.report})
	if err != nil {
		return nil, fmt.Errorf("prepare machine: %w", err)
	}
	return &Prepared{machine: m}, nil
}

// CPUs is the number of vCPUs.
func (p *Prepared) CPUs() int { return p.machine.shape.CPUs }

// Close gives the virtual machine back, unless a machine was made of it. It is
// idempotent.
func (p *Prepared) Close() error {
	m := p.take()
	if m == nil {
		return nil
	}
	return m.Close()
}

// take returns the machine, once.
func (p *Prepared) take() *Machine {
	m := p.machine
	p.machine = nil
	return m
}
