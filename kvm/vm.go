package kvm

import (
	"fmt"
	"os"
	"sync"
)

// A VM is one machine: memory slots, interrupt controllers, vCPUs.
type VM struct {
	handle
	mmapSize   int
	xsaveSize  int
	nestedSize int

	vcpusMu sync.Mutex
	vcpus   []*VCPU // still to be closed, guarded by vcpusMu
	closing bool    // guarded by vcpusMu
}

// Close closes the vCPUs of the VM, waiting for those that run, and then the
// VM. Eventfds and memory that were given to it stay the caller's. The memory
// may be unmapped after Close returned.
func (vm *VM) Close() error {
	vm.vcpusMu.Lock()
	vcpus := vm.vcpus
	vm.vcpus, vm.closing = nil, true
	vm.vcpusMu.Unlock()
	var first error
	for _, v := range vcpus {
		if err := v.Close(); err != nil && first == nil {
			first = err
		}
	}
	if err := vm.close(); err != nil && first == nil {
		first = err
	}
	return first
}

// CheckExtension is KVM_CHECK_EXTENSION for this VM.
func (vm *VM) CheckExtension(c Capability) (int, error) {
	n, err := vm.number(ioctlCheckExtension, uintptr(c))
	return n, vm.wrap("check "+c.String(), err)
}

// EnableCap is KVM_ENABLE_CAP with up to four arguments.
func (vm *VM) EnableCap(c Capability, args ...uint64) error {
	arg := enableCap{Cap: uint32(c)}
	if len(args) > len(arg.Args) {
		return vm.wrap("enable "+c.String(), fmt.Errorf("%d arguments, at most %d", len(args), len(arg.Args)))
	}
	copy(arg.Args[:], args)
	_, err := pointer(&vm.handle, ioctlEnableCap, &arg)
	return vm.wrap("enable "+c.String(), err)
}

// A MemoryRegion is one memory slot: Size bytes at the process's address
// HostAddress appear at GuestPhys. All three are multiples of the page size.
type MemoryRegion struct {
	Slot        uint32
	Flags       uint32 // MemoryReadonly, MemoryLogDirtyPages
	GuestPhys   uint64
	Size        uint64 // 0 deletes the slot
	HostAddress uintptr
}

// SetUserMemoryRegion is KVM_SET_USER_MEMORY_REGION. The mapping at
// HostAddress must exist until the slot is deleted or the VM is closed; what
// is mapped there may change at any time, the guest sees the change.
func (vm *VM) SetUserMemoryRegion(r MemoryRegion) error {
	arg := userspaceMemoryRegion{
		Slot:          r.Slot,
		Flags:         r.Flags,
		GuestPhysAddr: r.GuestPhys,
		MemorySize:    r.Size,
		UserspaceAddr: uint64(r.HostAddress),
	}
	_, err := pointer(&vm.handle, ioctlSetUserMemoryRegion, &arg)
	return vm.wrap(fmt.Sprintf("set memory slot %d", r.Slot), err)
}

// CreateVCPU is KVM_CREATE_VCPU. The id is the APIC id of the processor; 0 is
// the one that starts unless SetBootCPUID said otherwise.
func (vm *VM) CreateVCPU(id int) (*VCPU, error) {
	vm.vcpusMu.Lock()
	defer vm.vcpusMu.Unlock()
	if vm.closing {
		return nil, vm.wrap(fmt.Sprintf("create vcpu %d", id), os.ErrClosed)
	}
	fd, err := retry(func() (int, error) { return vm.number(ioctlCreateVCPU, uintptr(id)) })
	if err != nil {
		return nil, vm.wrap(fmt.Sprintf("create vcpu %d", id), err)
	}
	v, err := newVCPU(vm, id, fd)
	if err != nil {
		return nil, err
	}
	vm.vcpus = append(vm.vcpus, v)
	return v, nil
}

// forget drops a vCPU that closed itself.
func (vm *VM) forget(v *VCPU) {
	vm.vcpusMu.Lock()
	defer vm.vcpusMu.Unlock()
	for i, other := range vm.vcpus {
		if other == v {
			vm.vcpus = append(vm.vcpus[:i], vm.vcpus[i+1:]...)
			return
		}
	}
}
