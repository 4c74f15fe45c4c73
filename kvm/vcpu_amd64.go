package kvm

import (
	"encoding/binary"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// get reads one fixed-size part of a vCPU's state.
func get[T any](v *VCPU, verb string, nr uintptr) (T, error) {
	var t T
	_, err := pointer(&v.handle, nr, &t)
	return t, v.wrap(verb, err)
}

// set writes one fixed-size part of a vCPU's state.
func set[T any](v *VCPU, verb string, nr uintptr, t T) error {
	_, err := pointer(&v.handle, nr, &t)
	return v.wrap(verb, err)
}

// Regs is KVM_GET_REGS.
func (v *VCPU) Regs() (Regs, error) { return get[Regs](v, "get registers", ioctlGetRegs) }

// SetRegs is KVM_SET_REGS. It drops an exception that was about to be
// injected, so it comes before SetVCPUEvents.
func (v *VCPU) SetRegs(r Regs) error { return set(v, "set registers", ioctlSetRegs, r) }

// Sregs is KVM_GET_SREGS.
func (v *VCPU) Sregs() (Sregs, error) { return get[Sregs](v, "get special registers", ioctlGetSregs) }

// SetSregs is KVM_SET_SREGS.
func (v *VCPU) SetSregs(s Sregs) error { return set(v, "set special registers", ioctlSetSregs, s) }

// Sregs2 is KVM_GET_SREGS2, with the page-directory pointers of PAE paging. It
// needs CapSregs2.
func (v *VCPU) Sregs2() (Sregs2, error) {
	return get[Sregs2](v, "get special registers 2", ioctlGetSregs2)
}

// SetSregs2 is KVM_SET_SREGS2.
func (v *VCPU) SetSregs2(s Sregs2) error {
	return set(v, "set special registers 2", ioctlSetSregs2, s)
}

// FPU is KVM_GET_FPU. It is a part of XSAVE.
func (v *VCPU) FPU() (FPU, error) { return get[FPU](v, "get fpu", ioctlGetFPU) }

// SetFPU is KVM_SET_FPU.
func (v *VCPU) SetFPU(f FPU) error { return set(v, "set fpu", ioctlSetFPU, f) }

// xsaveMinSize is what KVM_GET_XSAVE and kernels without CapXSAVE2 write.
const xsaveMinSize = 4096

// XSAVESize is the length of what XSAVE returns, in bytes: 4096 or what
// CapXSAVE2 says for this VM.
func (v *VCPU) XSAVESize() int { return v.vm.xsaveSize }

// XSAVE is KVM_GET_XSAVE2, or KVM_GET_XSAVE where that is all there is: the
// processor's extended state in the standard format of XSAVE, Intel SDM
// volume 1, section 13.4, at the offsets of CPUID leaf 0xd.
func (v *VCPU) XSAVE() ([]byte, error) {
	nr := uintptr(ioctlGetXSAVE)
	if v.vm.xsaveSize > xsaveMinSize {
		nr = ioctlGetXSAVE2
	}
	p := make([]byte, v.vm.xsaveSize)
	if err := bytesPointer(&v.handle, nr, p); err != nil {
		return nil, v.wrap("get xsave", err)
	}
	return p, nil
}

// SetXSAVE is KVM_SET_XSAVE. It takes XSAVESize bytes, no fewer: the kernel
// reads that many.
func (v *VCPU) SetXSAVE(p []byte) error {
	if len(p) < v.vm.xsaveSize {
		return v.wrap("set xsave", fmt.Errorf("%d bytes, %d are needed", len(p), v.vm.xsaveSize))
	}
	return v.wrap("set xsave", bytesPointer(&v.handle, ioctlSetXSAVE, p))
}

// XCRS is KVM_GET_XCRS: the extended control registers.
func (v *VCPU) XCRS() (XCRS, error) { return get[XCRS](v, "get xcrs", ioctlGetXCRS) }

// SetXCRS is KVM_SET_XCRS. What it may set depends on CPUID.
func (v *VCPU) SetXCRS(x XCRS) error { return set(v, "set xcrs", ioctlSetXCRS, x) }

// DebugRegs is KVM_GET_DEBUGREGS.
func (v *VCPU) DebugRegs() (DebugRegs, error) {
	return get[DebugRegs](v, "get debug registers", ioctlGetDebugRegs)
}

// SetDebugRegs is KVM_SET_DEBUGREGS.
func (v *VCPU) SetDebugRegs(d DebugRegs) error {
	return set(v, "set debug registers", ioctlSetDebugRegs, d)
}

// LAPIC is KVM_GET_LAPIC: the local APIC's register page.
func (v *VCPU) LAPIC() (LAPIC, error) { return get[LAPIC](v, "get lapic", ioctlGetLAPIC) }

// SetLAPIC is KVM_SET_LAPIC. The APIC base of the special registers decides
// how it is read, so it comes after SetSregs.
func (v *VCPU) SetLAPIC(l LAPIC) error { return set(v, "set lapic", ioctlSetLAPIC, l) }

// VCPUEvents is KVM_GET_VCPU_EVENTS: exceptions and interrupts in delivery.
func (v *VCPU) VCPUEvents() (VCPUEvents, error) {
	return get[VCPUEvents](v, "get vcpu events", ioctlGetVCPUEvents)
}

// SetVCPUEvents is KVM_SET_VCPU_EVENTS.
func (v *VCPU) SetVCPUEvents(e VCPUEvents) error {
	return set(v, "set vcpu events", ioctlSetVCPUEvents, e)
}

// An MPState says whether a processor runs, waits for an interrupt or waits
// to be started.
type MPState uint32

// String is the kernel's name, such as KVM_MP_STATE_RUNNABLE.
func (s MPState) String() string { return nameOr(namesMPState, s, "KVM_MP_STATE") }

// MPState is KVM_GET_MP_STATE. It may process a pending INIT or startup
// interrupt and so change other state: ask it first when saving.
func (v *VCPU) MPState() (MPState, error) {
	s, err := get[mpState](v, "get mp state", ioctlGetMPState)
	return MPState(s.MPState), err
}

// SetMPState is KVM_SET_MP_STATE.
func (v *VCPU) SetMPState(s MPState) error {
	return set(v, "set mp state", ioctlSetMPState, mpState{MPState: uint32(s)})
}

// CPUID is KVM_GET_CPUID2: what SetCPUID gave, with what the kernel keeps up
// to date in it. Leaves of zeros may be missing.
func (v *VCPU) CPUID() ([]CPUIDEntry, error) {
	buf := sizedFlexible[cpuidHeader, CPUIDEntry](cpuidHeader{NEnt: maxCPUIDEntries}, maxCPUIDEntries)
	if _, err := pointer(&v.handle, ioctlGetCPUID2, &buf.words[0]); err != nil {
		return nil, v.wrap("get cpuid", err)
	}
	return buf.elements(int(min(buf.head().NEnt, maxCPUIDEntries))), nil
}

// SetCPUID is KVM_SET_CPUID2. Before the first Run; a later call is an error
// unless the entries are the same.
func (v *VCPU) SetCPUID(entries []CPUIDEntry) error {
	if len(entries) > maxCPUIDEntries {
		return v.wrap("set cpuid", unix.E2BIG)
	}
	buf := newFlexible(cpuidHeader{NEnt: uint32(len(entries))}, entries)
	_, err := pointer(&v.handle, ioctlSetCPUID2, &buf.words[0])
	return v.wrap("set cpuid", err)
}

// maxMSRs is less than the kernel's MAX_IO_MSRS, which one call must not
// reach.
const maxMSRs = 255

// MSRs is KVM_GET_MSRS: it reads the registers named by Index into Data. It
// stops at the first that the kernel refuses, with an [*MSRError]; the ones
// before it are read. Lists of any length are read in as many calls as it
// takes.
func (v *VCPU) MSRs(entries []MSREntry) error {
	bad, err := msrs(&v.handle, ioctlGetMSRs, entries)
	if err == nil && bad >= 0 {
		return &MSRError{VCPU: v.id, Index: entries[bad].Index}
	}
	return v.wrap("get msrs", err)
}

// SetMSRs is KVM_SET_MSRS, in the order of entries. It stops at the first that
// the kernel refuses, with an [*MSRError]; the ones before it are written.
func (v *VCPU) SetMSRs(entries []MSREntry) error {
	bad, err := msrs(&v.handle, ioctlSetMSRs, entries)
	if err == nil && bad >= 0 {
		return &MSRError{Write: true, VCPU: v.id, Index: entries[bad].Index, Value: entries[bad].Data}
	}
	return v.wrap("set msrs", err)
}

// msrs reads or writes entries. The kernel answers with the number it did;
// bad is the position of the first it did not do, or -1.
func msrs(h *handle, nr uintptr, entries []MSREntry) (bad int, err error) {
	for done := 0; done < len(entries); {
		part := entries[done:min(done+maxMSRs, len(entries))]
		buf := newFlexible(msrsHeader{NMSRs: uint32(len(part))}, part)
		n, err := pointer(h, nr, &buf.words[0])
		if err != nil {
			return -1, err
		}
		n = min(n, len(part))
		if nr == ioctlGetMSRs {
			copy(part[:n], buf.elements(n))
		}
		if done += n; n < len(part) {
			return done, nil
		}
	}
	return -1, nil
}

// TSCKHz is KVM_GET_TSC_KHZ: the rate of the guest's time stamp counter.
func (v *VCPU) TSCKHz() (int, error) {
	n, err := v.number(ioctlGetTSCKHz, 0)
	return n, v.wrap("get tsc rate", err)
}

// SetTSCKHz is KVM_SET_TSC_KHZ. Rates away from the host's need
// CapTSCControl.
func (v *VCPU) SetTSCKHz(khz int) error {
	_, err := v.number(ioctlSetTSCKHz, uintptr(khz))
	return v.wrap(fmt.Sprintf("set tsc rate %d kHz", khz), err)
}

// TSCOffset reads the attribute KVM_VCPU_TSC_OFFSET: what is added to the
// host's counter. Linux 5.16.
func (v *VCPU) TSCOffset() (int64, error) {
	var offset int64
	err := v.tscOffset(ioctlGetDeviceAttr, &offset)
	return offset, v.wrap("get tsc offset", err)
}

// SetTSCOffset writes the attribute KVM_VCPU_TSC_OFFSET.
func (v *VCPU) SetTSCOffset(offset int64) error {
	return v.wrap("set tsc offset", v.tscOffset(ioctlSetDeviceAttr, &offset))
}

func (v *VCPU) tscOffset(nr uintptr, offset *int64) error {
	var pin runtime.Pinner // the kernel follows Addr: offset must not move
	pin.Pin(offset)
	defer pin.Unpin()
	arg := deviceAttr{Group: attrVCPUTSCCtrl, Attr: attrVCPUTSCOffset, Addr: addressOf(offset)}
	_, err := pointer(&v.handle, nr, &arg)
	if err == unix.ENXIO || err == unix.ENOTTY {
		return fmt.Errorf("%w (KVM_VCPU_TSC_OFFSET)", ErrNotSupported)
	}
	return err
}

// nestedHeaderSize is sizeof(struct kvm_nested_state), its header alone.
const nestedHeaderSize = 128

// NestedState is KVM_GET_NESTED_STATE: the guest's own guest, as it is in the
// processor. The error is an [ErrNotSupported] where KVM does not nest.
func (v *VCPU) NestedState() ([]byte, error) {
	if v.vm.nestedSize == 0 {
		return nil, v.wrap("get nested state", notSupported("nesting", CapNestedState))
	}
	p := make([]byte, max(v.vm.nestedSize, nestedHeaderSize))
	binary.LittleEndian.PutUint32(p[nestedSizeOffset:], uint32(len(p)))
	if err := bytesPointer(&v.handle, ioctlGetNestedState, p); err != nil {
		return nil, v.wrap("get nested state", err)
	}
	n := binary.LittleEndian.Uint32(p[nestedSizeOffset:])
	return p[:min(int(n), len(p))], nil
}

// nestedSizeOffset is the place of kvm_nested_state.size.
const nestedSizeOffset = 4

// SetNestedState is KVM_SET_NESTED_STATE with what NestedState returned. It
// comes after the special registers and before the events.
func (v *VCPU) SetNestedState(p []byte) error {
	if v.vm.nestedSize == 0 {
		return v.wrap("set nested state", notSupported("nesting", CapNestedState))
	}
	if len(p) < nestedHeaderSize || uint64(binary.LittleEndian.Uint32(p[nestedSizeOffset:])) > uint64(len(p)) {
		return v.wrap("set nested state", fmt.Errorf("%d bytes are fewer than its own size", len(p)))
	}
	return v.wrap("set nested state", bytesPointer(&v.handle, ioctlSetNestedState, p))
}

// KVMClockCtrl is KVM_KVMCLOCK_CTRL: it tells the guest's watchdogs that the
// host had stopped it. It reports false when the guest has not turned
// kvmclock on, which is no error.
func (v *VCPU) KVMClockCtrl() (bool, error) {
	_, err := v.number(ioctlKVMClockCtrl, 0)
	if err == unix.EINVAL {
		return false, nil
	}
	return err == nil, v.wrap("tell guest it was paused", err)
}

// NMI is KVM_NMI: it queues a non-maskable interrupt.
func (v *VCPU) NMI() error {
	_, err := v.number(ioctlNMI, 0)
	return v.wrap("queue nmi", err)
}

// Interrupt is KVM_INTERRUPT: it queues an interrupt vector. Only without a
// local APIC in the kernel.
func (v *VCPU) Interrupt(vector uint8) error {
	return set(v, fmt.Sprintf("queue interrupt %d", vector), ioctlInterrupt, interrupt{IRQ: uint32(vector)})
}
