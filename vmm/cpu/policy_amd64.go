package cpu

import (
	"fmt"
	"slices"
	"sync"

	"github.com/forkvm/forkvm/kvm"
)

// maxCPUs is what an 8-bit APIC id without the broadcast address allows.
const maxCPUs = 255

// A Policy holds what the vCPUs of one machine have in common. Its methods may
// be called from several goroutines, for different vCPUs.
type Policy struct {
	cpus      int
	supported cpuid
	indices   []uint32 // of the host's KVM_GET_MSR_INDEX_LIST

	mu    sync.Mutex
	cpuid []cpuid  // what each vCPU has; guarded by mu
	msrs  []uint32 // to save, in the order of restoring; nil: not known yet; guarded by mu
}

// NewPolicy asks the host what it supports, for a machine of cpus vCPUs.
func NewPolicy(sys *kvm.System, cpus int) (*Policy, error) {
	if cpus < 1 || cpus > maxCPUs {
		return nil, fmt.Errorf("create cpu policy: %d vcpus, between 1 and %d are possible", cpus, maxCPUs)
	}
	supported, err := sys.SupportedCPUID()
	if err != nil {
		return nil, fmt.Errorf("create cpu policy: %w", err)
	}
	indices, err := sys.MSRIndexList()
	if err != nil {
		return nil, fmt.Errorf("create cpu policy: %w", err)
	}
	return &Policy{cpus: cpus, supported: supported, indices: indices, cpuid: make([]cpuid, cpus)}, nil
}

// Prepare gives a new vCPU its CPUID. It comes first: what other state KVM
// accepts depends on it.
func (p *Policy) Prepare(v *kvm.VCPU, index int) error {
	if index < 0 || index >= p.cpus {
		return fmt.Errorf("prepare vcpu (%d): machine has %d", index, p.cpus)
	}
	return p.setCPUID(v, index, guestCPUID(p.supported, index, p.cpus))
}

// setCPUID does nothing if the vCPU has these entries already.
func (p *Policy) setCPUID(v *kvm.VCPU, index int, entries cpuid) error {
	p.mu.Lock()
	same := slices.Equal(p.cpuid[index], entries)
	p.mu.Unlock()
	if same {
		return nil
	}
	if err := v.SetCPUID(entries); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cpuid[index] = entries
	return nil
}

// saved is the CPUID of a vCPU and the MSRs that belong to its state. The
// first call finds out which ones KVM lets us read.
func (p *Policy) saved(v *kvm.VCPU) (cpuid, []uint32, error) {
	index := v.ID()
	p.mu.Lock()
	defer p.mu.Unlock()
	if index >= p.cpus || p.cpuid[index] == nil {
		return nil, nil, fmt.Errorf("vcpu %d was never prepared", index)
	}
	if p.msrs == nil {
		list, err := readableMSRs(v, wantedMSRs(p.indices, p.cpuid[index]))
		if err != nil {
			return nil, nil, err
		}
		p.msrs = list
	}
	return p.cpuid[index], p.msrs, nil
}
