package kvm

import (
	"encoding/binary"
	"fmt"
)

// IRQLine is KVM_IRQ_LINE: it sets the level of a global interrupt. For an
// edge, raise and lower.
func (vm *VM) IRQLine(gsi uint32, level bool) error {
	arg := irqLevel{IRQ: gsi}
	if level {
		arg.Level = 1
	}
	if _, err := pointer(&vm.handle, ioctlIRQLine, &arg); err != nil {
		return vm.wrap(fmt.Sprintf("set irq line %d", gsi), err)
	}
	return nil
}

// An IRQFD ties an eventfd to a global interrupt.
type IRQFD struct {
	FD  int
	GSI uint32
	// Resample makes the interrupt level-triggered: it stays raised until
	// the guest acknowledges it, which signals ResampleFD.
	Resample   bool
	ResampleFD int
}

// AssignIRQFD is KVM_IRQFD: each signal on FD raises the interrupt, without a
// system call of this process in between. The VM keeps a reference to the
// eventfd.
func (vm *VM) AssignIRQFD(i IRQFD) error { return vm.irqfd("assign irqfd", i, 0) }

// DeassignIRQFD undoes AssignIRQFD with the same FD and GSI. Signals sent
// before it returns have been delivered.
func (vm *VM) DeassignIRQFD(i IRQFD) error {
	return vm.irqfd("deassign irqfd", IRQFD{FD: i.FD, GSI: i.GSI}, IRQFDFlagDeassign)
}

func (vm *VM) irqfd(verb string, i IRQFD, flags uint32) error {
	arg := irqfd{FD: uint32(i.FD), GSI: i.GSI, Flags: flags}
	if i.Resample {
		arg.Flags |= IRQFDFlagResample
		arg.ResampleFD = uint32(i.ResampleFD)
	}
	_, err := pointer(&vm.handle, ioctlIRQFD, &arg)
	return vm.wrap(fmt.Sprintf("%s of gsi %d", verb, i.GSI), err)
}

// An IOEventFD ties an eventfd to a guest's writes: those to Address, of
// Length bytes (1, 2, 4, 8; 0 for any), and only of the value DataMatch if
// Match is set. They signal FD and cause no exit.
type IOEventFD struct {
	FD        int
	Address   uint64
	Length    uint32
	PIO       bool // Address is an I/O port, not guest-physical
	Match     bool
	DataMatch uint64
}

// AssignIOEventFD is KVM_IOEVENTFD. The VM keeps a reference to the eventfd.
func (vm *VM) AssignIOEventFD(e IOEventFD) error { return vm.ioeventfd("assign ioeventfd", e, 0) }

// DeassignIOEventFD undoes AssignIOEventFD with the same value.
func (vm *VM) DeassignIOEventFD(e IOEventFD) error {
	return vm.ioeventfd("deassign ioeventfd", e, IOEventFDFlagDeassign)
}

func (vm *VM) ioeventfd(verb string, e IOEventFD, flags uint32) error {
	arg := ioeventfd{Addr: e.Address, Len: e.Length, FD: int32(e.FD), Flags: flags}
	if e.PIO {
		arg.Flags |= IOEventFDFlagPIO
	}
	if e.Match {
		arg.Flags |= IOEventFDFlagDataMatch
		arg.DataMatch = e.DataMatch
	}
	_, err := pointer(&vm.handle, ioctlIOEventFD, &arg)
	return vm.wrap(fmt.Sprintf("%s at %#x", verb, e.Address), err)
}

// A Route says where a global interrupt goes. Make one with RouteIRQChip or
// RouteMSI.
type Route struct{ entry irqRoutingEntry }

// RouteIRQChip sends gsi to a pin of one of the kernel's interrupt chips
// (IRQChipPICMaster, IRQChipPICSlave, IRQChipIOAPIC).
func RouteIRQChip(gsi, chip, pin uint32) Route {
	r := Route{irqRoutingEntry{GSI: gsi, Type: IRQRoutingIRQChip}}
	binary.LittleEndian.PutUint32(r.entry.U[0:], chip)
	binary.LittleEndian.PutUint32(r.entry.U[4:], pin)
	return r
}

// RouteMSI sends gsi as a message-signalled interrupt.
func RouteMSI(gsi uint32, address uint64, data uint32) Route {
	r := Route{irqRoutingEntry{GSI: gsi, Type: IRQRoutingMSI}}
	binary.LittleEndian.PutUint64(r.entry.U[0:], address)
	binary.LittleEndian.PutUint32(r.entry.U[8:], data)
	return r
}

// SetGSIRouting is KVM_SET_GSI_ROUTING: it replaces all routes.
func (vm *VM) SetGSIRouting(routes []Route) error {
	entries := make([]irqRoutingEntry, len(routes))
	for i, r := range routes {
		entries[i] = r.entry
	}
	buf := newFlexible(irqRoutingHeader{NR: uint32(len(routes))}, entries)
	_, err := pointer(&vm.handle, ioctlSetGSIRouting, &buf.words[0])
	return vm.wrap(fmt.Sprintf("set %d gsi routes", len(routes)), err)
}

// SignalMSI is KVM_SIGNAL_MSI: it delivers one message-signalled interrupt
// now. It reports false when the guest has it masked.
func (vm *VM) SignalMSI(address uint64, data uint32) (delivered bool, err error) {
	arg := msi{AddressLo: uint32(address), AddressHi: uint32(address >> 32), Data: data}
	n, err := pointer(&vm.handle, ioctlSignalMSI, &arg)
	return n > 0, vm.wrap(fmt.Sprintf("signal msi %#x", address), err)
}
