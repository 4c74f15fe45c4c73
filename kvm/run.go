package kvm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// An ExitReason says why a vCPU stopped, as in kvm_run.exit_reason.
type ExitReason uint32

// String is the kernel's name, such as KVM_EXIT_IO.
func (r ExitReason) String() string { return nameOr(namesExitReason, r, "KVM_EXIT") }

// Run is KVM_RUN: it runs the guest on the calling thread until something
// needs an answer. Reasons have their data in IO, MMIO, InternalError and so
// on, which are valid until the next Run or Close, on the same goroutine.
//
// ExitIntr means that nothing happened but a signal, a kick or the wake-up of
// a processor that had been waiting for its startup interrupt: look why, and
// run again. The registers and memory that an I/O exit affects are only
// settled by the next Run; to save a vCPU, SetImmediateExit(true) and Run once
// more.
func (v *VCPU) Run() (ExitReason, error) {
	fd, err := v.acquire()
	if err != nil {
		return 0, v.wrap("run", err)
	}
	defer v.release()
	if v.closing.Load() {
		return 0, v.wrap("run", os.ErrClosed)
	}
	_, err = ioctl(fd, ioctlRun, 0)
	switch err {
	case nil:
		return ExitReason(v.state().ExitReason), nil
	case unix.EINTR, unix.EAGAIN:
		// EAGAIN: a waiting processor became runnable and wants the call again.
		return ExitIntr, nil
	}
	return 0, v.wrap("run", err)
}

// SetRequestInterruptWindow asks for ExitIRQWindowOpen as soon as the guest
// can take an interrupt. Only without a local APIC in the kernel.
func (v *VCPU) SetRequestInterruptWindow(on bool) { v.setRequestInterruptWindow(on) }

// IO is the data of ExitIO: Count accesses of Size bytes to one port. Data is
// all of them in order; it is filled in by the caller when Out is false.
type IO struct {
	Port  uint16
	Size  int
	Count int
	Out   bool
	Data  []byte
}

// IO returns the data of ExitIO. Data is the shared memory itself.
func (v *VCPU) IO() IO {
	e := exitData[ioExit](v)
	io := IO{Port: e.Port, Size: int(e.Size), Count: int(e.Count), Out: e.Direction == IODirectionOut}
	// The kernel wrote these numbers, and only it; the check is for a kernel
	// that would share less than it announces.
	start, n := e.DataOffset, uint64(e.Count)*uint64(e.Size)
	if total := uint64(len(v.run)); start <= total && n <= total-start {
		io.Data = v.run[start : start+n : start+n]
	}
	return io
}

// MMIO is the data of ExitMMIO: one access of 1 to 8 bytes to guest-physical
// memory that is in no slot. Data is filled in by the caller unless Write.
type MMIO struct {
	Address uint64
	Write   bool
	Data    []byte
}

// MMIO returns the data of ExitMMIO. Data is the shared memory itself.
func (v *VCPU) MMIO() MMIO {
	e := exitData[mmioExit](v)
	n := min(int(e.Len), len(e.Data))
	return MMIO{Address: e.PhysAddr, Write: e.IsWrite != 0, Data: e.Data[:n:n]}
}

// An InternalError is a kind of ExitInternalError.
type InternalError uint32

// String is the kernel's name, such as KVM_INTERNAL_ERROR_EMULATION.
func (e InternalError) String() string { return nameOr(namesInternalError, e, "KVM_INTERNAL_ERROR") }

// An InternalErrorInfo is the data of ExitInternalError: KVM could not go on
// with this guest. Data is raw; Instruction is what could not be emulated, if
// that is the reason and KVM says so.
type InternalErrorInfo struct {
	Kind        InternalError
	Data        []uint64
	Instruction []byte
}

// String is one line for reports.
func (i InternalErrorInfo) String() string {
	if len(i.Instruction) > 0 {
		return fmt.Sprintf("%v: instruction bytes % x", i.Kind, i.Instruction)
	}
	return fmt.Sprintf("%v: data %#x", i.Kind, i.Data)
}

// InternalError returns the data of ExitInternalError, copied.
func (v *VCPU) InternalError() InternalErrorInfo {
	e := exitData[internalErrorExit](v)
	n := min(int(e.NData), len(e.Data))
	info := InternalErrorInfo{Kind: InternalError(e.Suberror), Data: append([]uint64(nil), e.Data[:n]...)}
	if f := exitData[emulationFailure](v); info.Kind == InternalErrorEmulation && n >= 3 &&
		f.Flags&internalErrorEmulationFlagInstructionBytes != 0 {
		size := min(int(f.InsnSize), len(f.InsnBytes))
		info.Instruction = append([]byte(nil), f.InsnBytes[:size]...)
	}
	return info
}

// FailEntry is the data of ExitFailEntry: the processor refused the state of
// the vCPU. Reason is the processor's own number.
type FailEntry struct {
	Reason uint64
	CPU    uint32 // of the host
}

// String is one line for reports.
func (f FailEntry) String() string {
	return fmt.Sprintf("hardware entry failure %#x on host cpu %d", f.Reason, f.CPU)
}

// FailEntry returns the data of ExitFailEntry.
func (v *VCPU) FailEntry() FailEntry {
	e := exitData[failEntryExit](v)
	return FailEntry{Reason: e.HardwareEntryFailureReason, CPU: e.CPU}
}

// A SystemEvent is the data of ExitSystemEvent. Type is SystemEventShutdown,
// SystemEventReset, SystemEventCrash or another of the kernel's.
type SystemEvent struct {
	Type uint32
	Data []uint64
}

// SystemEvent returns the data of ExitSystemEvent, copied.
func (v *VCPU) SystemEvent() SystemEvent {
	e := exitData[systemEventExit](v)
	n := min(int(e.NData), len(e.Data))
	return SystemEvent{Type: e.Type, Data: append([]uint64(nil), e.Data[:n]...)}
}

// HardwareReason returns the data of ExitUnknown: the processor's own number
// for an exit that KVM does not know.
func (v *VCPU) HardwareReason() uint64 { return exitData[unknownExit](v).HardwareExitReason }

// An MSRAccess is the data of ExitX86RDMSR and ExitX86WRMSR, which a VM has
// after EnableCap(CapX86UserSpaceMSR).
type MSRAccess struct {
	Index  uint32
	Reason uint32
	Data   uint64 // of a write
}

// MSRAccess returns the data of ExitX86RDMSR or ExitX86WRMSR.
func (v *VCPU) MSRAccess() MSRAccess {
	e := exitData[msrExit](v)
	return MSRAccess{Index: e.Index, Reason: e.Reason, Data: e.Data}
}

// AnswerMSRAccess gives the value that was read; with fault the guest gets a
// general protection exception instead.
func (v *VCPU) AnswerMSRAccess(data uint64, fault bool) {
	e := exitData[msrExit](v)
	e.Data, e.Error = data, 0
	if fault {
		e.Error = 1
	}
}
