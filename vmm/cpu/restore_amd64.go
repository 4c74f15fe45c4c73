package cpu

import (
	"errors"
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// Rewind prepares the vCPUs of a machine that has run for Restore. It is called
// with the one that is restored first.
//
// KVM takes a value for a time stamp counter that is within a second of what the
// counter shows for an attempt to synchronise it with the others, and lets it run
// on (kvm_synchronize_tsc). After a value from far away it takes the next one as
// it is; those of the other vCPUs are near to that and follow it.
func (p *Policy) Rewind(first *kvm.VCPU) error {
	const farAway = 1 << 62
	if err := first.SetMSRs([]kvm.MSREntry{{Index: msrTSC, Data: farAway}}); err != nil {
		return fmt.Errorf("rewind vcpu (%d): %w", first.ID(), err)
	}
	return nil
}

// Restore gives a prepared vCPU that does not run the state s, in an order in
// which every part finds what it depends on. The state is not trusted: what
// does not fit is an error, an [*IncompatibleError] if it is the host's
// processor that it does not fit, and the vCPU is good for nothing but Close
// then. All memory of the guest is in place.
func (p *Policy) Restore(v *kvm.VCPU, s *State) error {
	if err := p.restore(v, s); err != nil {
		return fmt.Errorf("restore vcpu (%d): %w", v.ID(), err)
	}
	return nil
}

func (p *Policy) restore(v *kvm.VCPU, s *State) error {
	if s.ID != v.ID() || s.ID >= p.cpus {
		return fmt.Errorf("state is of vcpu %d", s.ID)
	}
	if err := compare(s.CPUID, p.supported); err != nil {
		return err
	}
	xsave, err := fitXSAVE(s.XSAVE, v.XSAVESize())
	if err != nil {
		return err
	}
	xcrs := kvm.XCRS{NRXCRS: uint32(len(s.XCRs))}
	if len(s.XCRs) > len(xcrs.XCRS) {
		return fmt.Errorf("%d extended control registers", len(s.XCRs))
	}
	copy(xcrs.XCRS[:], s.XCRs)

	steps := []func() error{
		func() error { return p.setCPUID(v, s.ID, s.CPUID) },
		func() error { return setTSCRate(v, s.TSCKHz) }, // before the counter
		func() error { return v.SetMPState(s.MPState) },
		func() error { return v.SetRegs(s.Regs) },
		func() error { return v.SetSregs(s.Sregs) },
		func() error { return v.SetXSAVE(xsave) },
		func() error { return v.SetXCRS(xcrs) },
		func() error { return v.SetDebugRegs(s.DebugRegs) },
		func() error { return v.SetLAPIC(s.LAPIC) }, // after the APIC base in Sregs
		func() error { return v.SetMSRs(s.MSRs) },   // the deadline needs the timer's mode
		func() error { return setNested(v, s.Nested) },
		func() error { return v.SetVCPUEvents(s.Events) }, // SetRegs drops exceptions
		func() error { _, err := v.KVMClockCtrl(); return err },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	p.adoptMSRs(s)
	return nil
}

// adoptMSRs makes the next Save of this machine record the same registers.
func (p *Policy) adoptMSRs(s *State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.msrs != nil {
		return
	}
	p.msrs = make([]uint32, len(s.MSRs))
	for i, m := range s.MSRs {
		p.msrs[i] = m.Index
	}
}

// fitXSAVE makes extended state as long as KVM wants it. Bytes beyond that
// belong to components this host does not have; only zeros can be left out.
func fitXSAVE(saved []byte, size int) ([]byte, error) {
	for _, b := range saved[min(len(saved), size):] {
		if b != 0 {
			return nil, fmt.Errorf("extended state of %d bytes, host has room for %d", len(saved), size)
		}
	}
	fit := make([]byte, size)
	copy(fit, saved)
	return fit, nil
}

// tscTolerance is KVM's own for a rate that needs no scaling: 250 millionths,
// here as a divisor.
const tscTolerance = 4000

// setTSCRate makes the counter run at the rate the guest has measured.
func setTSCRate(v *kvm.VCPU, khz uint32) error {
	host, err := v.TSCKHz()
	if err != nil {
		return err
	}
	if diff := int64(khz) - int64(host); khz == 0 || max(diff, -diff) <= int64(host)/tscTolerance {
		return nil
	}
	if err := v.SetTSCKHz(int(khz)); err != nil {
		return errors.Join(&IncompatibleError{Details: []string{
			fmt.Sprintf("time stamp counter runs at %d kHz, host has %d kHz and cannot scale it", khz, host),
		}}, err)
	}
	return nil
}

func setNested(v *kvm.VCPU, state []byte) error {
	if len(state) == 0 {
		return nil
	}
	return v.SetNestedState(state)
}
