package cpu

import (
	"errors"
	"slices"

	"github.com/forkvm/forkvm/kvm"
)

// Model-specific registers, Intel SDM volume 4 and AMD APM volume 2,
// appendix A.
const (
	msrTSC         = 0x10
	msrMiscEnable  = 0x1a0
	msrTSCDeadline = 0x6e0
	msrMTRRDefType = 0x2ff
)

// mtrrs are the memory type ranges. A guest sets them and reads them back, but
// KVM's list leaves them out.
func mtrrs() []uint32 {
	list := []uint32{0x250, 0x258, 0x259, 0x268, 0x269, 0x26a, 0x26b, 0x26c, 0x26d, 0x26e, 0x26f, msrMTRRDefType}
	for i := uint32(0x200); i < 0x210; i++ { // eight pairs of base and mask
		list = append(list, i)
	}
	return list
}

// An msrRange is a first and a last index.
type msrRange struct{ first, last uint32 }

// unsavedMSRs are in KVM's list and not in ours.
func unsavedMSRs(c cpuid) []msrRange {
	list := []msrRange{
		// Writing the address of the wall clock makes KVM write the guest's memory;
		// a guest writes it itself whenever it wants the time.
		{kvm.MSRKVMWallClock, kvm.MSRKVMWallClock},
		{kvm.MSRKVMWallClockNew, kvm.MSRKVMWallClockNew},
		// The old number of MSRKVMSystemTimeNew, for the same thing.
		{kvm.MSRKVMSystemTime, kvm.MSRKVMSystemTime},
		// Hidden: asynchronous page faults, migration control, Hyper-V.
		{kvm.MSRKVMAsyncPFEn, kvm.MSRKVMAsyncPFEn},
		{kvm.MSRKVMAsyncPFInt, kvm.MSRKVMAsyncPFAck},
		{kvm.MSRKVMMigrationControl, kvm.MSRKVMMigrationControl},
		{0x40000000, 0x400001ff},
		// Hidden: Intel's performance counters and processor trace. AMD's first
		// four counters need no announcement in CPUID and are saved.
		{0xc1, 0xc8}, {0x186, 0x18d}, {0x309, 0x30c}, {0x329, 0x329}, {0x345, 0x345},
		{0x38d, 0x390}, {0x3f1, 0x3f2}, {0x4c1, 0x4c8}, {0x600, 0x600}, {0x560, 0x58f},
		{0xc0010200, 0xc001020b}, {0xc0000300, 0xc0000303},
	}
	if !c.nests() {
		list = append(list, msrRange{0x480, 0x493}, msrRange{0xc0010117, 0xc0010117}, msrRange{0xc0000104, 0xc0000104})
	}
	return list
}

// nests reports whether the guest may have guests.
func (c cpuid) nests() bool {
	const vmx, svm = 1 << 5, 1 << 2
	return c.value(1, 0, ecx)&vmx != 0 || c.value(0x80000001, 0, ecx)&svm != 0
}

// wantedMSRs is what a vCPU's state should have, in the order of restoring.
func wantedMSRs(indices []uint32, c cpuid) []uint32 {
	list := append(slices.Clone(indices), mtrrs()...)
	unsaved := unsavedMSRs(c)
	list = slices.DeleteFunc(list, func(index uint32) bool {
		return slices.ContainsFunc(unsaved, func(r msrRange) bool { return r.first <= index && index <= r.last })
	})
	slices.Sort(list)
	list = slices.Compact(list)
	slices.SortStableFunc(list, func(a, b uint32) int { return restoreRank(a) - restoreRank(b) })
	return list
}

// restoreRank orders what depends on each other: the deadline of the timer is
// a value of the counter, the counter comes after what adjusts it.
func restoreRank(index uint32) int {
	switch index {
	case msrTSC:
		return 1
	case msrTSCDeadline:
		return 2
	}
	return 0
}

// readableMSRs leaves out what KVM does not let us read from this vCPU:
// its list is for all CPUIDs.
func readableMSRs(v *kvm.VCPU, indices []uint32) ([]uint32, error) {
	list := indices
	for {
		_, err := readMSRs(v, list)
		var bad *kvm.MSRError
		if err == nil {
			return list, nil
		}
		if !errors.As(err, &bad) {
			return nil, err
		}
		list = slices.DeleteFunc(list, func(index uint32) bool { return index == bad.Index })
	}
}

func readMSRs(v *kvm.VCPU, indices []uint32) ([]kvm.MSREntry, error) {
	entries := make([]kvm.MSREntry, len(indices))
	for i, index := range indices {
		entries[i].Index = index
	}
	return entries, v.MSRs(entries)
}
