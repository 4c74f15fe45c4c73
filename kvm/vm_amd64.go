package kvm

import "fmt"

// readSizes asks how long the variable parts of a vCPU's state are.
func (vm *VM) readSizes() error {
	n, err := vm.CheckExtension(CapXSAVE2)
	if err != nil {
		return err
	}
	vm.xsaveSize = max(n, xsaveMinSize)
	vm.nestedSize, err = vm.CheckExtension(CapNestedState)
	return err
}

// SetTSSAddr is KVM_SET_TSS_ADDR: three pages of guest-physical space below 4
// GiB, outside any memory slot, that Intel hosts need to run real mode.
func (vm *VM) SetTSSAddr(address uint64) error {
	_, err := vm.number(ioctlSetTSSAddr, uintptr(address))
	return vm.wrap(fmt.Sprintf("set tss address %#x", address), err)
}

// SetIdentityMapAddr is KVM_SET_IDENTITY_MAP_ADDR: one page like those of
// SetTSSAddr. Before any vCPU is made.
func (vm *VM) SetIdentityMapAddr(address uint64) error {
	_, err := pointer(&vm.handle, ioctlSetIdentityMapAddr, &address)
	return vm.wrap(fmt.Sprintf("set identity map address %#x", address), err)
}

// SetBootCPUID is KVM_SET_BOOT_CPU_ID. Before any vCPU is made.
func (vm *VM) SetBootCPUID(id int) error {
	_, err := vm.number(ioctlSetBootCPUID, uintptr(id))
	return vm.wrap(fmt.Sprintf("set boot cpu id %d", id), err)
}

// CreateIRQChip is KVM_CREATE_IRQCHIP: two PICs, an I/O APIC and a local APIC
// per vCPU, all in the kernel. Before any vCPU is made. For local APICs only,
// use EnableCap with CapSplitIRQChip instead.
func (vm *VM) CreateIRQChip() error {
	_, err := vm.number(ioctlCreateIRQChip, 0)
	return vm.wrap("create irqchip", err)
}

// CreatePIT2 is KVM_CREATE_PIT2: the interval timer, after CreateIRQChip.
// Flags are 0 or PITSpeakerDummy, which answers port 0x61 too.
func (vm *VM) CreatePIT2(flags uint32) error {
	_, err := pointer(&vm.handle, ioctlCreatePIT2, &pitConfig{Flags: flags})
	return vm.wrap("create pit", err)
}

// IRQChip is KVM_GET_IRQCHIP for IRQChipPICMaster, IRQChipPICSlave or
// IRQChipIOAPIC.
func (vm *VM) IRQChip(id uint32) (IRQChip, error) {
	chip := IRQChip{ChipID: id}
	_, err := pointer(&vm.handle, ioctlGetIRQChip, &chip)
	return chip, vm.wrap(fmt.Sprintf("get irqchip %d", id), err)
}

// SetIRQChip is KVM_SET_IRQCHIP.
func (vm *VM) SetIRQChip(chip IRQChip) error {
	_, err := pointer(&vm.handle, ioctlSetIRQChip, &chip)
	return vm.wrap(fmt.Sprintf("set irqchip %d", chip.ChipID), err)
}

// PIT is KVM_GET_PIT2.
func (vm *VM) PIT() (PITState, error) {
	var s PITState
	_, err := pointer(&vm.handle, ioctlGetPIT2, &s)
	return s, vm.wrap("get pit", err)
}

// SetPIT is KVM_SET_PIT2.
func (vm *VM) SetPIT(s PITState) error {
	_, err := pointer(&vm.handle, ioctlSetPIT2, &s)
	return vm.wrap("set pit", err)
}

// Clock is KVM_GET_CLOCK: the nanoseconds that kvmclock shows the guest. Flags
// say which of the other fields the host filled in and whether all vCPUs see
// the same clock (ClockTSCStable).
func (vm *VM) Clock() (ClockData, error) {
	var c ClockData
	_, err := pointer(&vm.handle, ioctlGetClock, &c)
	return c, vm.wrap("get clock", err)
}

// SetClock is KVM_SET_CLOCK. What Clock returned is not acceptable as it is:
// see [ClockData.Frozen] and [ClockData.Following].
func (vm *VM) SetClock(c ClockData) error {
	_, err := pointer(&vm.handle, ioctlSetClock, &c)
	return vm.wrap("set clock", err)
}

// Frozen is the saved clock made ready for SetClock so that the guest's
// monotonic time goes on where it stopped. Every flag is cleared: kernels
// before 5.16 refuse all of them, and a host_tsc of another boot or another
// machine would move the clock by the difference of two unrelated counters.
func (c ClockData) Frozen() ClockData { return ClockData{Clock: c.Clock} }

// Following is the saved clock made ready for SetClock so that the guest's
// monotonic time also contains the time since it was saved. It reports false,
// and the same as Frozen, when the saving host recorded no real time; the
// restoring host must have bit ClockRealtime in CapAdjustClock.
func (c ClockData) Following() (ClockData, bool) {
	if c.Flags&ClockRealtime == 0 {
		return c.Frozen(), false
	}
	return ClockData{Clock: c.Clock, Flags: ClockRealtime, Realtime: c.Realtime}, true
}
