package kvm

import "golang.org/x/sys/unix"

// mandatory lists what Open insists on: without any one of these a Linux
// guest either cannot run or cannot be saved and restored. All are in the
// kernels of the last ten years, on Intel and on AMD.
func mandatory() []Capability {
	return []Capability{
		CapIRQChip, CapHLT, CapUserMemory, CapDestroyMemoryRegionWorks, CapJoinMemoryRegionsWorks,
		CapSetTSSAddr, CapSetIdentityMapAddr, CapExtCPUID, CapMPState, CapIRQRouting, CapIRQFD,
		CapIOEventFD, CapPIT2, CapPITState2, CapAdjustClock, CapVCPUEvents, CapDebugRegs,
		CapXSAVE, CapXCRS, CapGetTSCKHz, CapKVMClockCtrl, CapSignalMSI, CapTSCDeadlineTimer,
		CapCheckExtensionVM, CapSplitIRQChip, CapImmediateExit, CapNRVCPUs, CapNRMemSlots,
	}
}

// Sizes of the kernel's own limits: KVM_MAX_CPUID_ENTRIES, and room for more
// MSR numbers than any kernel lists.
const (
	maxCPUIDEntries = 256
	maxMSRIndices   = 4096
)

// SupportedCPUID is KVM_GET_SUPPORTED_CPUID: the leaves that host and KVM can
// give to a guest, with the values of the processor the call happens to run
// on in the leaves that name a processor.
func (s *System) SupportedCPUID() ([]CPUIDEntry, error) {
	buf := sizedFlexible[cpuidHeader, CPUIDEntry](cpuidHeader{NEnt: maxCPUIDEntries}, maxCPUIDEntries)
	if _, err := pointer(&s.handle, ioctlGetSupportedCPUID, &buf.words[0]); err != nil {
		return nil, s.wrap("get supported cpuid", err)
	}
	return buf.elements(int(min(buf.head().NEnt, maxCPUIDEntries))), nil
}

// MSRIndexList is KVM_GET_MSR_INDEX_LIST: the registers whose values belong
// to a saved vCPU. Some of them may not be readable with a given CPUID.
func (s *System) MSRIndexList() ([]uint32, error) {
	return s.msrList("get msr index list", ioctlGetMSRIndexList)
}

// MSRFeatureIndexList is KVM_GET_MSR_FEATURE_INDEX_LIST: the registers that
// describe what the host can virtualize.
func (s *System) MSRFeatureIndexList() ([]uint32, error) {
	if n, err := s.CheckExtension(CapGetMSRFeatures); err != nil || n == 0 {
		if err == nil {
			err = notSupported("get msr feature index list", CapGetMSRFeatures)
		}
		return nil, err
	}
	return s.msrList("get msr feature index list", ioctlGetMSRFeatureIndexList)
}

func (s *System) msrList(verb string, nr uintptr) ([]uint32, error) {
	buf := sizedFlexible[msrListHeader, uint32](msrListHeader{NMSRs: maxMSRIndices}, maxMSRIndices)
	if _, err := pointer(&s.handle, nr, &buf.words[0]); err != nil {
		return nil, s.wrap(verb, err)
	}
	n := buf.head().NMSRs
	if n > maxMSRIndices {
		return nil, s.wrap(verb, unix.E2BIG)
	}
	return append([]uint32(nil), buf.elements(int(n))...), nil
}

// FeatureMSRs is KVM_GET_MSRS on the device: it reads the registers of
// [System.MSRFeatureIndexList] into the Data of entries.
func (s *System) FeatureMSRs(entries []MSREntry) error {
	bad, err := msrs(&s.handle, ioctlGetMSRs, entries)
	if err == nil && bad >= 0 {
		err = &MSRError{VCPU: -1, Index: entries[bad].Index}
	}
	return s.wrap("get feature msrs", err)
}
