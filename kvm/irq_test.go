package kvm

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func eventfd(t *testing.T) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func signal(t *testing.T, fd int) {
	t.Helper()
	if _, err := unix.Write(fd, binary.LittleEndian.AppendUint64(nil, 1)); err != nil {
		t.Fatal(err)
	}
}

// signals returns the number of signals since the last call.
func signals(t *testing.T, fd int) uint64 {
	t.Helper()
	var p [8]byte
	if _, err := unix.Read(fd, p[:]); err == unix.EAGAIN {
		return 0
	} else if err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint64(p[:])
}

func TestIOEventFD(t *testing.T) {
	vm, v, _ := guest(t,
		0xb0, 0x01, // mov al, 1
		0xe6, 0x80, // out 0x80, al: the port's eventfd
		0xb8, 0x00, 0x20, // mov ax, 0x2000
		0x8e, 0xd8, // mov ds, ax
		0xb8, 0x07, 0x00, // mov ax, 7
		0xa3, 0x50, 0x00, // mov [0x50], ax: matches
		0x40,             // inc ax
		0xa3, 0x50, 0x00, // mov [0x50], ax: does not
		0xf4, // hlt
	)
	port := IOEventFD{FD: eventfd(t), Address: 0x80, Length: 1, PIO: true}
	mmio := IOEventFD{FD: eventfd(t), Address: 0x20050, Length: 2, Match: true, DataMatch: 7}
	for _, e := range []IOEventFD{port, mmio} {
		if err := vm.AssignIOEventFD(e); err != nil {
			t.Fatal(err)
		}
	}
	expect(t, v, ExitMMIO)
	if m := v.MMIO(); m.Address != 0x20050 || m.Data[0] != 8 {
		t.Errorf("exit for %+v, want only the write that does not match", m)
	}
	if n := signals(t, port.FD); n != 1 {
		t.Errorf("port: %d signals", n)
	}
	if n := signals(t, mmio.FD); n != 1 {
		t.Errorf("mmio: %d signals", n)
	}
	for _, e := range []IOEventFD{port, mmio} {
		if err := vm.DeassignIOEventFD(e); err != nil {
			t.Fatal(err)
		}
	}
	realMode(t, v)
	expect(t, v, ExitIO)
	if n := signals(t, port.FD); n != 0 {
		t.Errorf("port after deassign: %d signals", n)
	}
	if err := vm.DeassignIOEventFD(port); err == nil {
		t.Error("deassigning twice is no error")
	}
}

// chipVM has interrupt chips and one vCPU.
func chipVM(t *testing.T) (*VM, *VCPU) {
	t.Helper()
	vm := newVM(t)
	if err := vm.SetTSSAddr(0xfffbd000); err != nil {
		t.Fatal(err)
	}
	if err := vm.CreateIRQChip(); err != nil {
		t.Fatal(err)
	}
	v, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	return vm, v
}

// ioapicIRR is the I/O APIC's set of requested interrupts.
func ioapicIRR(t *testing.T, vm *VM) uint32 {
	t.Helper()
	chip, err := vm.IRQChip(IRQChipIOAPIC)
	if err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint32(chip.Chip[16:])
}

// levelTriggered makes a pin keep its request until it is acknowledged.
func levelTriggered(t *testing.T, vm *VM, pin int) {
	t.Helper()
	chip, err := vm.IRQChip(IRQChipIOAPIC)
	if err != nil {
		t.Fatal(err)
	}
	entry := chip.Chip[24+8*pin:]
	binary.LittleEndian.PutUint64(entry, 1<<16|1<<15|0x40) // masked, level, vector
	if err := vm.SetIRQChip(chip); err != nil {
		t.Fatal(err)
	}
}

func TestIRQLine(t *testing.T) {
	vm, _ := chipVM(t)
	levelTriggered(t, vm, 9)
	if err := vm.IRQLine(9, true); err != nil {
		t.Fatal(err)
	}
	if irr := ioapicIRR(t, vm); irr != 1<<9 {
		t.Errorf("raised: irr %#x", irr)
	}
	if err := vm.IRQLine(9, false); err != nil {
		t.Fatal(err)
	}
	if irr := ioapicIRR(t, vm); irr != 0 {
		t.Errorf("lowered: irr %#x", irr)
	}
}

func TestIRQFD(t *testing.T) {
	vm, _ := chipVM(t)
	levelTriggered(t, vm, 10)
	i := IRQFD{FD: eventfd(t), GSI: 10, Resample: true, ResampleFD: eventfd(t)}
	if err := vm.AssignIRQFD(i); err != nil {
		t.Fatal(err)
	}
	signal(t, i.FD)
	for deadline := time.Now().Add(10 * time.Second); ioapicIRR(t, vm) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no interrupt 10 s after the signal")
		}
	}
	if err := vm.DeassignIRQFD(i); err != nil {
		t.Fatal(err)
	}
	if irr := ioapicIRR(t, vm); irr != 0 {
		t.Errorf("after deassign: irr %#x", irr)
	}
	signal(t, i.FD)
	time.Sleep(10 * time.Millisecond)
	if irr := ioapicIRR(t, vm); irr != 0 {
		t.Errorf("signal after deassign: irr %#x", irr)
	}
}

// lapicRegister reads one 32-bit register of the local APIC.
func lapicRegister(t *testing.T, v *VCPU, offset int) uint32 {
	t.Helper()
	l, err := v.LAPIC()
	if err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint32(l.Regs[offset:])
}

const (
	lapicSpurious = 0xf0  // Intel SDM volume 3, section 11.9: bit 8 enables
	lapicIRR      = 0x200 // section 11.8.4: eight registers, 16 bytes apart
)

// enableLAPIC lets the local APIC take interrupts.
func enableLAPIC(t *testing.T, v *VCPU) {
	t.Helper()
	l, err := v.LAPIC()
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint32(l.Regs[lapicSpurious:], 0x1ff)
	if err := v.SetLAPIC(l); err != nil {
		t.Fatal(err)
	}
}

const msiToCPU0 = 0xfee00000

func TestSignalMSI(t *testing.T) {
	vm, v := chipVM(t)
	enableLAPIC(t, v)
	delivered, err := vm.SignalMSI(msiToCPU0, 0x45)
	if err != nil || !delivered {
		t.Fatalf("delivered %v, %v", delivered, err)
	}
	if irr := lapicRegister(t, v, lapicIRR+16*(0x45/32)); irr != 1<<(0x45%32) {
		t.Errorf("irr %#x", irr)
	}
}

func TestGSIRouting(t *testing.T) {
	vm, v := chipVM(t)
	enableLAPIC(t, v)
	routes := []Route{RouteIRQChip(3, IRQChipIOAPIC, 7), RouteMSI(30, msiToCPU0, 0x51)}
	if err := vm.SetGSIRouting(routes); err != nil {
		t.Fatal(err)
	}
	levelTriggered(t, vm, 7)
	if err := vm.IRQLine(3, true); err != nil {
		t.Fatal(err)
	}
	if irr := ioapicIRR(t, vm); irr != 1<<7 {
		t.Errorf("gsi 3 to pin 7: irr %#x", irr)
	}
	if err := vm.IRQLine(30, true); err != nil {
		t.Fatal(err)
	}
	if irr := lapicRegister(t, v, lapicIRR+16*(0x51/32)); irr != 1<<(0x51%32) {
		t.Errorf("gsi 30 as message: irr %#x", irr)
	}
	if err := vm.SetGSIRouting(nil); err != nil {
		t.Errorf("no routes: %v", err)
	}
}

func TestSplitIRQChip(t *testing.T) {
	vm := newVM(t)
	if err := vm.EnableCap(CapSplitIRQChip, IOAPICNumPins); err != nil {
		t.Fatal(err)
	}
	if _, err := vm.IRQChip(IRQChipIOAPIC); err == nil {
		t.Error("there is an I/O APIC in the kernel")
	}
	v, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.LAPIC(); err != nil {
		t.Errorf("no local APIC: %v", err)
	}
	if err := vm.EnableCap(CapSplitIRQChip, 1, 2, 3, 4, 5); err == nil {
		t.Error("five arguments are no error")
	}
}
