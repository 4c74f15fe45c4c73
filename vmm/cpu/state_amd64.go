package cpu

import "github.com/forkvm/forkvm/kvm"

// A State is everything about one vCPU that its guest could notice. It is
// plain data and says nothing about the host it comes from beyond CPUID.
type State struct {
	ID        int // number of the vCPU, and its APIC id
	CPUID     []kvm.CPUIDEntry
	TSCKHz    uint32 // rate of the time stamp counter
	MPState   kvm.MPState
	Regs      kvm.Regs
	Sregs     kvm.Sregs
	XSAVE     []byte // standard format, zeros at the end left out
	XCRs      []kvm.XCR
	DebugRegs kvm.DebugRegs
	LAPIC     kvm.LAPIC
	MSRs      []kvm.MSREntry // in the order of restoring
	Nested    []byte         // empty unless the guest may have guests
	Events    kvm.VCPUEvents
}
