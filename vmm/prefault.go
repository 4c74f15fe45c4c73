package vmm

import (
	"fmt"

	"github.com/forkvm/forkvm/vmm/memory"
)

// PreFault enters pages of RAM into the guest's page tables before the guest
// touches them, which spares it an exit for each. It is for a machine that does
// not run. The error is a kvm.ErrNotSupported where KVM cannot do it; the guest
// does not need it.
func (m *Machine) PreFault(ranges []memory.PageRange) error {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phasePaused); err != nil {
		return fmt.Errorf("pre-fault memory: %w", err)
	}
	regions := m.memory.Regions()
	for _, r := range ranges {
		start, end := r.Start*memory.PageSize, (r.Start+r.Count)*memory.PageSize
		for _, region := range regions {
			from, to := max(start, region.Offset), min(end, region.Offset+region.Size)
			if from >= to {
				continue
			}
			// All vCPUs share the tables; a vCPU that is parked is not in KVM_RUN.
			if err := m.vcpus[0].fd.PreFault(region.GuestPhys+from-region.Offset, to-from); err != nil {
				return fmt.Errorf("pre-fault memory: %w", err)
			}
		}
	}
	return nil
}
