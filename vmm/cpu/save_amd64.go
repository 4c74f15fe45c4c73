package cpu

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// Save reads the whole state of a vCPU. The vCPU is not in Run, and its last
// Run returned kvm.ExitIntr: after any other exit a part of an instruction is
// still to be done by the next Run.
func (p *Policy) Save(v *kvm.VCPU) (*State, error) {
	entries, indices, err := p.saved(v)
	if err != nil {
		return nil, fmt.Errorf("save vcpu (%d): %w", v.ID(), err)
	}
	s := &State{ID: v.ID(), CPUID: entries}
	steps := []func() error{
		// First, because it may process a pending startup interrupt, which changes
		// registers.
		func() (err error) { s.MPState, err = v.MPState(); return },
		func() (err error) { s.Regs, err = v.Regs(); return },
		func() (err error) { s.Sregs, err = v.Sregs(); return },
		func() (err error) { s.XSAVE, err = v.XSAVE(); return },
		func() (err error) { s.XCRs, err = readXCRs(v); return },
		func() (err error) { s.DebugRegs, err = v.DebugRegs(); return },
		func() (err error) { s.LAPIC, err = v.LAPIC(); return },
		func() (err error) { s.MSRs, err = readMSRs(v, indices); return },
		func() (err error) { s.Nested, err = readNested(v, entries); return },
		func() (err error) { s.Events, err = v.VCPUEvents(); return },
		func() error { khz, err := v.TSCKHz(); s.TSCKHz = uint32(khz); return err },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return nil, fmt.Errorf("save vcpu (%d): %w", v.ID(), err)
		}
	}
	s.XSAVE = trimZeros(s.XSAVE)
	s.rearmTimer()
	return s, nil
}

// trimZeros cuts zeros off the end, most of them eight at a time: extended state is
// kilobytes of them.
func trimZeros(p []byte) []byte {
	for len(p) >= 8 && binary.LittleEndian.Uint64(p[len(p)-8:]) == 0 {
		p = p[:len(p)-8]
	}
	return bytes.TrimRight(p, "\x00")
}

func readXCRs(v *kvm.VCPU) ([]kvm.XCR, error) {
	x, err := v.XCRS()
	if err != nil {
		return nil, err
	}
	return x.XCRS[:min(int(x.NRXCRS), len(x.XCRS))], nil
}

func readNested(v *kvm.VCPU, entries cpuid) ([]byte, error) {
	if !entries.nests() {
		return nil, nil
	}
	return v.NestedState()
}

// rearmTimer makes a timer in deadline mode that reads as disarmed fire once
// after restoring. KVM clears the deadline when the timer has expired, and on
// some kernels that is before the interrupt shows up anywhere in the saved
// state; a guest that lost its tick hangs, one that gets a tick too many looks
// at its clock and goes on.
func (s *State) rearmTimer() {
	const (
		lvtTimer     = 0x320 // Intel SDM volume 3, section 11.5.1
		masked       = 1 << 16
		modeMask     = 3 << 17
		deadlineMode = 2 << 17
	)
	lvt := binary.LittleEndian.Uint32(s.LAPIC.Regs[lvtTimer:])
	if lvt&modeMask != deadlineMode || lvt&masked != 0 {
		return
	}
	deadline, tsc := s.msr(msrTSCDeadline), s.msr(msrTSC)
	if deadline != nil && tsc != nil && *deadline == 0 {
		*deadline = *tsc
	}
}

// msr is the place of a register's value, nil if it is not in the state.
func (s *State) msr(index uint32) *uint64 {
	for i := range s.MSRs {
		if s.MSRs[i].Index == index {
			return &s.MSRs[i].Data
		}
	}
	return nil
}
