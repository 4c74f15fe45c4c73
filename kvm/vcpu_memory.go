package kvm

import (
	"errors"

	"golang.org/x/sys/unix"
)

// PreFault is KVM_PRE_FAULT_MEMORY: it enters the pages of a guest-physical range
// into the guest's page tables, as reads by this vCPU would, one by one. A page
// that the process may write without a fault is entered as writable. The range is
// of whole pages, and all of it in memory slots. While the vCPU runs PreFault
// waits.
//
// The error is an [ErrNotSupported] before Linux 6.11, and where KVM has no
// nested paging.
func (v *VCPU) PreFault(guestPhys, size uint64) error {
	arg := preFaultMemory{GPA: guestPhys, Size: size}
	for arg.Size > 0 {
		// KVM takes what it has done off the range, also when a signal stops it.
		_, err := pointer(&v.handle, ioctlPreFaultMemory, &arg)
		switch {
		case err == nil || errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
		case v.cannotPreFault():
			return v.wrap("pre-fault memory", notSupported("pre-faulting", CapPreFaultMemory))
		default:
			return v.wrap("pre-fault memory", err)
		}
	}
	return nil
}

func (v *VCPU) cannotPreFault() bool {
	n, err := v.vm.CheckExtension(CapPreFaultMemory)
	return err == nil && n == 0
}
