package cpu

import (
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// stateVersion counts changes of the binary form. Numbers are little-endian
// and packed, in the order of State.visit.
const stateVersion = 1

// Limits of what is accepted, above anything KVM produces.
const (
	maxEntries = 4096
	maxBlob    = 64 << 10 // XSAVE with every component known is 11 KiB
)

// MarshalBinary returns the binary form. It never fails for what Save
// returned.
func (s *State) MarshalBinary() ([]byte, error) {
	c := &coder{data: make([]byte, 0, 8<<10)}
	s.visit(c)
	return c.data, c.err
}

// UnmarshalBinary reads the binary form, of any origin. It checks the form
// only; whether the values make sense is for KVM to say, in Policy.Restore.
func (s *State) UnmarshalBinary(data []byte) error {
	var fresh State
	c := &coder{data: data, decode: true}
	fresh.visit(c)
	if c.err == nil && len(c.data) > 0 {
		c.err = fmt.Errorf("%d bytes too many", len(c.data))
	}
	if c.err != nil {
		return fmt.Errorf("decode vcpu state: %w", c.err)
	}
	*s = fresh
	return nil
}

// visit names every field once, for both directions.
func (s *State) visit(c *coder) {
	version := uint32(stateVersion)
	c.u32(&version)
	if c.err == nil && version != stateVersion {
		c.fail(fmt.Errorf("version %d, this program reads %d", version, stateVersion))
	}
	id := uint32(s.ID)
	c.u32(&id)
	if c.err == nil && id >= maxCPUs {
		c.fail(fmt.Errorf("vcpu number %d", id))
	}
	s.ID = int(id)
	list(c, &s.CPUID, visitCPUID)
	c.u32(&s.TSCKHz)
	c.u32((*uint32)(&s.MPState))
	visitRegs(c, &s.Regs)
	visitSregs(c, &s.Sregs)
	c.blob(&s.XSAVE)
	list(c, &s.XCRs, func(c *coder, x *kvm.XCR) { c.u32(&x.XCR); c.u64(&x.Value) })
	visitDebugRegs(c, &s.DebugRegs)
	c.bytes(s.LAPIC.Regs[:])
	list(c, &s.MSRs, func(c *coder, m *kvm.MSREntry) { c.u32(&m.Index); c.u64(&m.Data) })
	c.blob(&s.Nested)
	visitEvents(c, &s.Events)
}

func visitCPUID(c *coder, e *kvm.CPUIDEntry) {
	for _, p := range []*uint32{&e.Function, &e.Index, &e.Flags, &e.EAX, &e.EBX, &e.ECX, &e.EDX} {
		c.u32(p)
	}
}

func visitRegs(c *coder, r *kvm.Regs) {
	for _, p := range []*uint64{
		&r.RAX, &r.RBX, &r.RCX, &r.RDX, &r.RSI, &r.RDI, &r.RSP, &r.RBP, &r.R8, &r.R9, &r.R10, &r.R11,
		&r.R12, &r.R13, &r.R14, &r.R15, &r.RIP, &r.RFLAGS,
	} {
		c.u64(p)
	}
}

func visitSregs(c *coder, s *kvm.Sregs) {
	for _, seg := range []*kvm.Segment{&s.CS, &s.DS, &s.ES, &s.FS, &s.GS, &s.SS, &s.TR, &s.LDT} {
		c.u64(&seg.Base)
		c.u32(&seg.Limit)
		c.u16(&seg.Selector)
		for _, p := range []*uint8{
			&seg.Type, &seg.Present, &seg.DPL, &seg.DB, &seg.S, &seg.L, &seg.G, &seg.AVL, &seg.Unusable,
		} {
			c.u8(p)
		}
	}
	for _, t := range []*kvm.DescriptorTable{&s.GDT, &s.IDT} {
		c.u64(&t.Base)
		c.u16(&t.Limit)
	}
	for _, p := range []*uint64{&s.CR0, &s.CR2, &s.CR3, &s.CR4, &s.CR8, &s.EFER, &s.APICBase} {
		c.u64(p)
	}
	for i := range s.InterruptBitmap {
		c.u64(&s.InterruptBitmap[i])
	}
}

func visitDebugRegs(c *coder, d *kvm.DebugRegs) {
	for i := range d.DB {
		c.u64(&d.DB[i])
	}
	for _, p := range []*uint64{&d.DR6, &d.DR7, &d.Flags} {
		c.u64(p)
	}
}

func visitEvents(c *coder, e *kvm.VCPUEvents) {
	for _, p := range []*uint8{
		&e.Exception.Injected, &e.Exception.NR, &e.Exception.HasErrorCode, &e.Exception.Pending,
		&e.Interrupt.Injected, &e.Interrupt.NR, &e.Interrupt.Soft, &e.Interrupt.Shadow,
		&e.NMI.Injected, &e.NMI.Pending, &e.NMI.Masked,
		&e.SMI.SMM, &e.SMI.Pending, &e.SMI.SMMInsideNMI, &e.SMI.LatchedInit,
		&e.TripleFault.Pending, &e.ExceptionHasPayload,
	} {
		c.u8(p)
	}
	for _, p := range []*uint32{&e.Exception.ErrorCode, &e.SIPIVector, &e.Flags} {
		c.u32(p)
	}
	c.u64(&e.ExceptionPayload)
}
