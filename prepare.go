package forkvm

import (
	"fmt"

	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/kvm"
)

// Prepared is what of a machine can be made before it is known what it will run:
// a virtual machine with its vCPUs. Creating one can take tens of milliseconds on
// some hosts, which a machine whose Config has a Prepared does not wait for.
type Prepared struct{ prepared *machine.Prepared }

// Prepare makes a virtual machine for one guest with this many vCPUs, 1 to 32; 0
// means 1.
func Prepare(cpus int) (*Prepared, error) {
	system, err := kvm.Open()
	if err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	// The machine's own descriptors are enough for it.
	defer system.Close()
	p, err := machine.Prepare(system, max(cpus, 1))
	if err != nil {
		return nil, err
	}
	return &Prepared{p}, nil
}

// Close gives the virtual machine back if it was not used. It is idempotent.
func (p *Prepared) Close() error {
	if unused := p.take(); unused != nil {
		return unused.Close()
	}
	return nil
}

// take returns what is prepared, once; nil when there is nothing.
func (p *Prepared) take() *machine.Prepared {
	if p == nil {
		return nil
	}
	unused := p.prepared
	p.prepared = nil
	return unused
}
