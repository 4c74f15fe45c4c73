package main

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/forkvm/forkvm/kvm"
)

// keepKVM opens virtual machines that stay for the machine's life and never run.
//
// KVM patches its own code ("static keys") when the first virtual machine or
// local APIC of its kind appears and when the last one goes. QEMU before 8.1
// translates code on several threads without noticing such a patch in time, and
// the lab's kernel then dies of an int3 that should not be there any more. While
// one of each kind exists nothing is patched.
func keepKVM() error {
	system, err := kvm.Open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a kernel or an emulator without KVM: the lab is still good for other things
	}
	if err != nil {
		return err
	}
	if err := keepPlain(system); err != nil {
		return fmt.Errorf("keep kvm busy: %w", err)
	}
	if err := keepAPICs(system); err != nil {
		return fmt.Errorf("keep kvm busy: %w", err)
	}
	return nil
}

// keepPlain keeps a vCPU without local APIC.
func keepPlain(system *kvm.System) error {
	vm, err := system.CreateVM()
	if err != nil {
		return err
	}
	_, err = vm.CreateVCPU(0)
	return err
}

// keepAPICs keeps a local APIC that software has not enabled, and one that is
// off in hardware.
func keepAPICs(system *kvm.System) error {
	vm, err := system.CreateVM()
	if err != nil {
		return err
	}
	if err := vm.CreateIRQChip(); err != nil {
		return err
	}
	if _, err := vm.CreateVCPU(0); err != nil {
		return err
	}
	off, err := vm.CreateVCPU(1)
	if err != nil {
		return err
	}
	registers, err := off.Sregs()
	if err != nil {
		return err
	}
	const enabled = 1 << 11 // IA32_APIC_BASE, Intel SDM volume 3, section 11.4.3
	registers.APICBase &^= enabled
	return off.SetSregs(registers)
}
