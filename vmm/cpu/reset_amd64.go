package cpu

import (
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// An Entry is where a kernel is entered, as its PVH note and the boot loader
// say.
type Entry struct {
	Address   uint64 // of the first instruction, below 4 GiB
	StartInfo uint64 // guest-physical address of the start info structure, below 4 GiB
}

// Reset puts a prepared vCPU that has not run into the state in which a
// machine starts: vCPU 0 at the kernel's entry, the others waiting for the
// startup interrupt that vCPU 0 sends them.
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
	if entry.Address >= 1<<32 || entry.StartInfo >= 1<<32 {
		return fmt.Errorf("entry %#x or start info %#x is not below 4 GiB", entry.Address, entry.StartInfo)
	}
	s, err := v.Sregs()
	if err != nil {
		return err
	}
	enterFlat(&s)
	if err := v.SetSregs(s); err != nil {
		return err
	}
	const reserved = 1 << 1 // always set in RFLAGS; interrupts are off
	return v.SetRegs(kvm.Regs{RIP: entry.Address, RBX: entry.StartInfo, RFLAGS: reserved})
}

// enterFlat is the processor state of the x86/HVM direct boot ABI (PVH):
// 32-bit protected mode, paging off, flat segments. There is no descriptor
// table behind them; a kernel loads its own before it touches a segment.
func enterFlat(s *kvm.Sregs) {
	const (
		codeType = 11 // execute, read, accessed
		dataType = 3  // read, write, accessed
		tssType  = 11 // 32-bit, busy: the processor accepts no other in TR
		cr0PE    = 1 << 0
		cr0ET    = 1 << 4 // fixed
	)
	code := kvm.Segment{Limit: 0xffffffff, Selector: 0x08, Type: codeType, Present: 1, DB: 1, S: 1, G: 1}
	data := code
	data.Selector, data.Type = 0x10, dataType
	s.CS, s.DS, s.ES, s.FS, s.GS, s.SS = code, data, data, data, data, data
	s.TR = kvm.Segment{Limit: 0x67, Selector: 0x18, Type: tssType, Present: 1}
	s.LDT = kvm.Segment{Unusable: 1}
	s.GDT, s.IDT = kvm.DescriptorTable{}, kvm.DescriptorTable{}
	s.CR0, s.CR3, s.CR4, s.EFER = cr0PE|cr0ET, 0, 0, 0
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
