package kvm

import (
	"testing"
	"unsafe"
)

// The numbers are those of the kernel's binary interface, which never change:
// a difference means that the generator went wrong.
func TestLayout(t *testing.T) {
	for _, tc := range []struct {
		what      string
		got, want uintptr
	}{
		{"sizeof regs", unsafe.Sizeof(Regs{}), 144},
		{"sizeof sregs", unsafe.Sizeof(Sregs{}), 312},
		{"sizeof sregs2", unsafe.Sizeof(Sregs2{}), 320},
		{"sizeof segment", unsafe.Sizeof(Segment{}), 24},
		{"sizeof dtable", unsafe.Sizeof(DescriptorTable{}), 16},
		{"sizeof fpu", unsafe.Sizeof(FPU{}), 416},
		{"sizeof lapic", unsafe.Sizeof(LAPIC{}), 1024},
		{"sizeof msr entry", unsafe.Sizeof(MSREntry{}), 16},
		{"sizeof msrs", unsafe.Sizeof(msrsHeader{}), 8},
		{"sizeof msr list", unsafe.Sizeof(msrListHeader{}), 4},
		{"sizeof cpuid entry", unsafe.Sizeof(CPUIDEntry{}), 40},
		{"sizeof cpuid", unsafe.Sizeof(cpuidHeader{}), 8},
		{"sizeof xcrs", unsafe.Sizeof(XCRS{}), 392},
		{"sizeof debug registers", unsafe.Sizeof(DebugRegs{}), 128},
		{"sizeof events", unsafe.Sizeof(VCPUEvents{}), 64},
		{"sizeof irqchip", unsafe.Sizeof(IRQChip{}), 520},
		{"sizeof ioapic", unsafe.Sizeof(IOAPICState{}), 216},
		{"sizeof pit", unsafe.Sizeof(PITState{}), 112},
		{"sizeof pit config", unsafe.Sizeof(pitConfig{}), 64},
		{"sizeof clock", unsafe.Sizeof(ClockData{}), 48},
		{"sizeof memory region", unsafe.Sizeof(userspaceMemoryRegion{}), 32},
		{"sizeof irqfd", unsafe.Sizeof(irqfd{}), 32},
		{"sizeof ioeventfd", unsafe.Sizeof(ioeventfd{}), 64},
		{"sizeof irq level", unsafe.Sizeof(irqLevel{}), 8},
		{"sizeof routing", unsafe.Sizeof(irqRoutingHeader{}), 8},
		{"sizeof routing entry", unsafe.Sizeof(irqRoutingEntry{}), 48},
		{"sizeof msi", unsafe.Sizeof(msi{}), 32},
		{"sizeof enable cap", unsafe.Sizeof(enableCap{}), 104},
		{"sizeof device attr", unsafe.Sizeof(deviceAttr{}), 24},
		{"sizeof nested state", unsafe.Sizeof(nestedStateHeader{}), nestedHeaderSize},
		{"sizeof pre-fault memory", unsafe.Sizeof(preFaultMemory{}), 64},
		{"sizeof run", unsafe.Sizeof(runState{}), 2352},

		{"run.immediate_exit", unsafe.Offsetof(runState{}.ImmediateExit), 1},
		{"run.exit_reason", unsafe.Offsetof(runState{}.ExitReason), 8},
		{"run.cr8", unsafe.Offsetof(runState{}.CR8), 16},
		{"run exit union", unsafe.Offsetof(runState{}.Exit), 32},
		{"io.data_offset", unsafe.Offsetof(ioExit{}.DataOffset), 8},
		{"mmio.data", unsafe.Offsetof(mmioExit{}.Data), 8},
		{"mmio.is_write", unsafe.Offsetof(mmioExit{}.IsWrite), 20},
		{"internal.data", unsafe.Offsetof(internalErrorExit{}.Data), 8},
		{"emulation_failure.insn_bytes", unsafe.Offsetof(emulationFailure{}.InsnBytes), 17},
		{"system_event.data", unsafe.Offsetof(systemEventExit{}.Data), 8},
		{"msr.data", unsafe.Offsetof(msrExit{}.Data), 16},
		{"sregs.cr0", unsafe.Offsetof(Sregs{}.CR0), 224},
		{"sregs.efer", unsafe.Offsetof(Sregs{}.EFER), 264},
		{"events.sipi_vector", unsafe.Offsetof(VCPUEvents{}.SIPIVector), 16},
		{"events.exception_payload", unsafe.Offsetof(VCPUEvents{}.ExceptionPayload), 56},
		{"clock.realtime", unsafe.Offsetof(ClockData{}.Realtime), 16},
		{"ioeventfd.fd", unsafe.Offsetof(ioeventfd{}.FD), 20},
		{"enable_cap.args", unsafe.Offsetof(enableCap{}.Args), 8},
		{"routing entry.u", unsafe.Offsetof(irqRoutingEntry{}.U), 16},
		{"nested_state.size", unsafe.Offsetof(nestedStateHeader{}.Size), nestedSizeOffset},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: %d, want %d", tc.what, tc.got, tc.want)
		}
	}
}

// Direction, size, type and number are all in an ioctl's code.
func TestIoctlNumbers(t *testing.T) {
	for _, tc := range []struct {
		what      string
		got, want uint32
	}{
		{"KVM_GET_API_VERSION", ioctlGetAPIVersion, 0xae00},
		{"KVM_CREATE_VM", ioctlCreateVM, 0xae01},
		{"KVM_GET_MSR_INDEX_LIST", ioctlGetMSRIndexList, 0xc004ae02},
		{"KVM_GET_SUPPORTED_CPUID", ioctlGetSupportedCPUID, 0xc008ae05},
		{"KVM_CREATE_VCPU", ioctlCreateVCPU, 0xae41},
		{"KVM_SET_USER_MEMORY_REGION", ioctlSetUserMemoryRegion, 0x4020ae46},
		{"KVM_IRQFD", ioctlIRQFD, 0x4020ae76},
		{"KVM_IOEVENTFD", ioctlIOEventFD, 0x4040ae79},
		{"KVM_SET_GSI_ROUTING", ioctlSetGSIRouting, 0x4008ae6a},
		{"KVM_GET_PIT2", ioctlGetPIT2, 0x8070ae9f},
		{"KVM_SET_CLOCK", ioctlSetClock, 0x4030ae7b},
		{"KVM_RUN", ioctlRun, 0xae80},
		{"KVM_GET_REGS", ioctlGetRegs, 0x8090ae81},
		{"KVM_SET_SREGS", ioctlSetSregs, 0x4138ae84},
		{"KVM_GET_MSRS", ioctlGetMSRs, 0xc008ae88},
		{"KVM_SET_MSRS", ioctlSetMSRs, 0x4008ae89},
		{"KVM_SET_CPUID2", ioctlSetCPUID2, 0x4008ae90},
		{"KVM_GET_XSAVE2", ioctlGetXSAVE2, 0x9000aecf},
		{"KVM_GET_NESTED_STATE", ioctlGetNestedState, 0xc080aebe},
		{"KVM_KVMCLOCK_CTRL", ioctlKVMClockCtrl, 0xaead},
		{"KVM_PRE_FAULT_MEMORY", ioctlPreFaultMemory, 0xc040aed5},
	} {
		if tc.got != tc.want {
			t.Errorf("%s: %#x, want %#x", tc.what, tc.got, tc.want)
		}
	}
}
