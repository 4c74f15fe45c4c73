package kvm_test

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/kvm"
)

// Open tells the reasons for a missing KVM apart.
func ExampleOpen() {
	sys, err := kvm.Open()
	var missing *kvm.MissingError
	switch {
	case errors.Is(err, fs.ErrPermission):
		fmt.Println("not allowed:", err)
	case errors.As(err, &missing):
		fmt.Println("too old, lacks", missing.Capabilities)
	case err != nil:
		fmt.Println("no kvm:", err)
	default:
		defer sys.Close()
	}
}

// The smallest guest: one page of memory, one processor in real mode, one
// byte to a port.
func ExampleVCPU_Run() {
	sys, err := kvm.Open()
	if err != nil {
		return
	}
	defer sys.Close()
	vm, err := sys.CreateVM()
	if err != nil {
		return
	}
	memory, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return
	}
	defer unix.Munmap(memory)
	defer vm.Close() // before the memory goes

	copy(memory, []byte{0xb0, '!', 0xe6, 0x80, 0xf4}) // mov al, '!'; out 0x80, al; hlt
	vm.SetTSSAddr(0xfffbd000)
	vm.SetUserMemoryRegion(kvm.MemoryRegion{Size: 4096, HostAddress: addressOf(memory)})
	vcpu, err := vm.CreateVCPU(0)
	if err != nil {
		return
	}

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	vcpu.Bind()
	defer vcpu.Unbind()
	sregs, _ := vcpu.Sregs()
	sregs.CS.Base, sregs.CS.Selector = 0, 0
	vcpu.SetSregs(sregs)
	vcpu.SetRegs(kvm.Regs{RFLAGS: 2})
	for {
		reason, err := vcpu.Run()
		switch {
		case err != nil:
			fmt.Println(err)
			return
		case reason == kvm.ExitIntr: // a signal: look whether to stop, go on
		case reason == kvm.ExitIO:
			io := vcpu.IO()
			fmt.Printf("port %#x: %q\n", io.Port, io.Data)
		case reason == kvm.ExitHLT:
			return
		default:
			fmt.Println("unexpected", reason)
			return
		}
	}
}

// The clock of a snapshot is cleaned before a VM gets it.
func ExampleClockData_Frozen() {
	saved := kvm.ClockData{Clock: 1_000_000_000, Flags: kvm.ClockHostTSC, HostTSC: 12345}
	fmt.Printf("%d ns, flags %#x\n", saved.Frozen().Clock, saved.Frozen().Flags)
	// Output: 1000000000 ns, flags 0x0
}
