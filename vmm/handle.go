package vmm

import (
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// handle does what the guest's exit asks for. It returns a report when the
// machine ends here.
func (v *vcpu) handle(reason kvm.ExitReason) *Exit {
	switch reason {
	case kvm.ExitIO:
		v.port()
		return nil
	case kvm.ExitMMIO:
		v.mmio()
		return nil
	case kvm.ExitShutdown:
		return v.exit(ReasonTripleFault, "")
	case kvm.ExitSystemEvent:
		return v.systemEvent()
	case kvm.ExitInternalError:
		return v.exit(ReasonInternalError, v.fd.InternalError().String())
	case kvm.ExitFailEntry:
		return v.exit(ReasonEntryFailed, v.fd.FailEntry().String())
	}
	return v.exit(ReasonUnknownExit, reason.String())
}

// port answers a port access. A string instruction makes Count accesses of Size
// bytes to the same port in one exit. Ports that nobody has read as ones and
// swallow writes, as on a bus without a device.
func (v *vcpu) port() {
	io := v.fd.IO()
	if io.Size <= 0 {
		return
	}
	for data := io.Data; len(data) >= io.Size; data = data[io.Size:] {
		if io.Out {
			v.m.PIO.Write(uint64(io.Port), data[:io.Size])
		} else {
			v.m.PIO.Read(uint64(io.Port), data[:io.Size])
		}
	}
}

func (v *vcpu) mmio() {
	access := v.fd.MMIO()
	if access.Write {
		v.m.MMIO.Write(access.Address, access.Data)
	} else {
		v.m.MMIO.Read(access.Address, access.Data)
	}
}

func (v *vcpu) systemEvent() *Exit {
	event := v.fd.SystemEvent()
	switch event.Type {
	case kvm.SystemEventShutdown:
		return v.exit(ReasonShutdown, "")
	case kvm.SystemEventReset:
		return v.exit(ReasonReset, "")
	case kvm.SystemEventCrash:
		return v.exit(ReasonGuestPanic, fmt.Sprintf("crash event %#x", event.Data))
	}
	return v.exit(ReasonUnknownExit, fmt.Sprintf("system event %d", event.Type))
}

// exit makes a report of an end that this vCPU saw.
func (v *vcpu) exit(reason Reason, detail string) *Exit {
	return &Exit{Reason: reason, VCPU: v.index, Detail: detail}
}

// dump returns the registers as text, in the order and with the names of a Linux
// oops, or why they cannot be had. After a triple fault on an AMD processor they
// are those of a reset: the architecture leaves nothing to read, and KVM puts the
// vCPU into a defined state.
func (v *vcpu) dump() string {
	r, err := v.fd.Regs()
	if err != nil {
		return err.Error()
	}
	s, err := v.fd.Sregs()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf(`RIP: %04x:%016x RFLAGS: %08x
RAX: %016x RBX: %016x RCX: %016x
RDX: %016x RSI: %016x RDI: %016x
RBP: %016x R08: %016x R09: %016x
R10: %016x R11: %016x R12: %016x
R13: %016x R14: %016x R15: %016x
RSP: %04x:%016x EFER: %016x
CR0: %016x CR2: %016x CR3: %016x CR4: %016x
GDT: %016x/%04x IDT: %016x/%04x TR: %04x FS: %016x GS: %016x
`,
		s.CS.Selector, r.RIP, r.RFLAGS,
		r.RAX, r.RBX, r.RCX,
		r.RDX, r.RSI, r.RDI,
		r.RBP, r.R8, r.R9,
		r.R10, r.R11, r.R12,
		r.R13, r.R14, r.R15,
		s.SS.Selector, r.RSP, s.EFER,
		s.CR0, s.CR2, s.CR3, s.CR4,
		s.GDT.Base, s.GDT.Limit, s.IDT.Base, s.IDT.Limit, s.TR.Selector, s.FS.Base, s.GS.Base)
}
