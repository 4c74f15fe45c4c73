package cpu

import (
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// An Entry is the state in which the first vCPU starts, as a boot loader wants
// it. What it does not name is as after a processor reset.
type Entry struct {
	RIP    uint64
	RBX    uint64 // PVH: guest-physical address of the start info structure
	RFLAGS uint64
	CR0    uint64
	CR4    uint64
	EFER   uint64
	Code   Segment // CS
	Data   Segment // DS, ES, FS, GS, SS
	Task   Segment // TR
	GDT    Table
	IDT    Table
}

// A Segment is a segment register with its hidden part, Intel SDM volume 3,
// section 3.4.5.
type Segment struct {
	Selector    uint16
	Base        uint64
	Limit       uint32 // in bytes
	Type        uint8
	System      bool // the S flag is clear
	Present     bool
	Default32   bool // D/B
	Granularity bool // G
}

// A Table is a descriptor table register.
type Table struct {
	Base  uint64
	Limit uint16
}

// Reset puts a prepared vCPU that has not run into the state in which a
// machine starts: vCPU 0 at the entry, the others waiting for the startup
// interrupt that vCPU 0 sends them.
func Reset(v *kvm.VCPU, index int, entry Entry) error {
	if err := resetMSRs(v); err != nil {
		return fmt.Errorf("reset vcpu (%d): %w", index, err)
	}
	if index != 0 {
		return nil // KVM made it wait
	}
	if err := enter(v, entry); err != nil {
		return fmt.Errorf("reset vcpu (%d): %w", index, err)
	}
	return nil
}

func enter(v *kvm.VCPU, entry Entry) error {
	s, err := v.Sregs()
	if err != nil {
		return err
	}
	data := entry.Data.kvm()
	s.CS, s.TR, s.LDT = entry.Code.kvm(), entry.Task.kvm(), kvm.Segment{Unusable: 1}
	s.DS, s.ES, s.FS, s.GS, s.SS = data, data, data, data, data
	s.GDT = kvm.DescriptorTable{Base: entry.GDT.Base, Limit: entry.GDT.Limit}
	s.IDT = kvm.DescriptorTable{Base: entry.IDT.Base, Limit: entry.IDT.Limit}
	s.CR0, s.CR3, s.CR4, s.EFER = entry.CR0, 0, entry.CR4, entry.EFER
	if err := v.SetSregs(s); err != nil {
		return err
	}
	return v.SetRegs(kvm.Regs{RIP: entry.RIP, RBX: entry.RBX, RFLAGS: entry.RFLAGS})
}

func (s Segment) kvm() kvm.Segment {
	flag := func(b bool) uint8 {
		if b {
			return 1
		}
		return 0
	}
	return kvm.Segment{
		Base: s.Base, Limit: s.Limit, Selector: s.Selector, Type: s.Type,
		Present: flag(s.Present), S: flag(!s.System), DB: flag(s.Default32), G: flag(s.Granularity),
		Unusable: flag(!s.Present),
	}
}

// resetMSRs does what firmware would have done. With memory type ranges off a
// kernel treats all memory as uncached, or does without the page attribute
// table.
func resetMSRs(v *kvm.VCPU) error {
	const (
		fastStrings = 1 << 0
		mtrrEnable  = 1 << 11
		writeBack   = 6
	)
	entries := []kvm.MSREntry{{Index: msrMiscEnable}}
	if err := v.MSRs(entries); err != nil {
		return err
	}
	entries[0].Data |= fastStrings
	return v.SetMSRs(append(entries, kvm.MSREntry{Index: msrMTRRDefType, Data: mtrrEnable | writeBack}))
}
