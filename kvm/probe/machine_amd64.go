package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/kvm"
)

// Guest-physical addresses, equal to linear ones for the first 2 MiB.
const (
	memorySize = 64 << 10
	pml4At     = 0x1000
	pdptAt     = 0x2000
	pdAt       = 0x3000
	gdtAt      = 0x4000
	idtAt      = 0x5000
	tssAt      = 0x6000
	stackAt    = 0x8000
	codeAt     = 0x9000
	dataAt     = 0xa000 // 4 KiB for xsave; the programs have this number in them
	breakAt    = 0xb000
	faultAt    = 0xb100
	syscallAt  = 0xb200

	tssPagesAt = 0xfffbd000 // for KVM's own use, outside memory
)

// Architectural numbers; sections are of Intel SDM volume 3.
const (
	cr0PE, cr0MP, cr0ET, cr0NE, cr0WP, cr0PG = 1, 1 << 1, 1 << 4, 1 << 5, 1 << 16, 1 << 31 // 2.5
	cr4PAE, cr4OSFXSR, cr4OSXMMEXCPT         = 1 << 5, 1 << 9, 1 << 10
	cr4OSXSAVE                               = 1 << 18
	eferSCE, eferLME, eferLMA                = 1, 1 << 8, 1 << 10 // 2.2.1
	pagePresent, pageWrite, pageUser         = 1, 2, 4            // 4.5
	pageLarge                                = 1 << 7
	msrSTAR, msrLSTAR, msrFMASK              = 0xc0000081, 0xc0000082, 0xc0000084 // 5.8.8

	kernelCode, kernelData = 0x08, 0x10
	userBase               = 0x18 // SYSRET takes +8 for data and +16 for code
)

// A machine has one vCPU that is about to run one program.
type machine struct {
	program program
	vm      *kvm.VM
	vcpu    *kvm.VCPU
	memory  []byte
}

func newMachine(sys *kvm.System, cpuid []kvm.CPUIDEntry, p program) (*machine, error) {
	m := &machine{program: p}
	if err := m.build(sys, cpuid); err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

func (m *machine) build(sys *kvm.System, cpuid []kvm.CPUIDEntry) error {
	var err error
	m.memory, err = unix.Mmap(-1, 0, memorySize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map guest memory: %w", err)
	}
	m.fillMemory()
	if m.vm, err = sys.CreateVM(); err != nil {
		return err
	}
	if err := m.vm.SetTSSAddr(tssPagesAt); err != nil {
		return err
	}
	err = m.vm.SetUserMemoryRegion(kvm.MemoryRegion{Size: memorySize, HostAddress: hostAddress(m.memory)})
	if err != nil {
		return err
	}
	if m.vcpu, err = m.vm.CreateVCPU(0); err != nil {
		return err
	}
	if err := m.vcpu.SetCPUID(cpuid); err != nil {
		return err
	}
	return m.setRegisters()
}

// close waits for the vCPU, which execute has seen stop.
func (m *machine) close() error {
	var err error
	if m.vm != nil {
		err = m.vm.Close()
	}
	if m.memory != nil {
		err = errors.Join(err, unix.Munmap(m.memory))
	}
	m.vm, m.memory = nil, nil
	return err
}

func (m *machine) fillMemory() {
	put := func(at int, value uint64) { binary.LittleEndian.PutUint64(m.memory[at:], value) }
	const table = pagePresent | pageWrite | pageUser
	put(pml4At, pdptAt|table)
	put(pdptAt, pdAt|table)
	put(pdAt, table|pageLarge)

	put(gdtAt+kernelCode, 0x00af9b000000ffff)
	put(gdtAt+kernelData, 0x00cf93000000ffff)
	put(gdtAt+userBase+8, 0x00cff3000000ffff)
	put(gdtAt+userBase+16, 0x00affb000000ffff)

	// 64-bit interrupt gates, section 6.14.1.
	gate := func(vector, handler int) {
		put(idtAt+16*vector, uint64(handler&0xffff)|kernelCode<<16|0x8e00<<32|uint64(handler>>16)<<48)
	}
	gate(3, breakAt)
	gate(14, faultAt)
	copy(m.memory[breakAt:], breakHandler)
	copy(m.memory[faultAt:], faultHandler)
	copy(m.memory[syscallAt:], syscallHandler)
	copy(m.memory[codeAt:], m.program.code)
}

// setRegisters puts the vCPU into long mode at the program's start.
func (m *machine) setRegisters() error {
	s, err := m.vcpu.Sregs()
	if err != nil {
		return err
	}
	data := kvm.Segment{Limit: 0xffffffff, Selector: kernelData, Type: 3, Present: 1, DB: 1, S: 1, G: 1}
	s.CS = kvm.Segment{Limit: 0xffffffff, Selector: kernelCode, Type: 11, Present: 1, L: 1, S: 1, G: 1}
	s.DS, s.ES, s.FS, s.GS, s.SS = data, data, data, data, data
	s.TR = kvm.Segment{Base: tssAt, Limit: 0x67, Type: 11, Present: 1}
	s.GDT = kvm.DescriptorTable{Base: gdtAt, Limit: userBase + 23}
	s.IDT = kvm.DescriptorTable{Base: idtAt, Limit: 16*32 - 1}
	s.CR0 = cr0PE | cr0MP | cr0ET | cr0NE | cr0WP | cr0PG
	s.CR3 = pml4At
	s.CR4 = cr4PAE | cr4OSFXSR | cr4OSXMMEXCPT | cr4OSXSAVE
	s.EFER = eferSCE | eferLME | eferLMA
	if err := m.vcpu.SetSregs(s); err != nil {
		return err
	}
	err = m.vcpu.SetMSRs([]kvm.MSREntry{
		{Index: msrSTAR, Data: (userBase|3)<<48 | kernelCode<<32},
		{Index: msrLSTAR, Data: syscallAt},
		{Index: msrFMASK, Data: 0},
	})
	if err != nil {
		return err
	}
	return m.vcpu.SetRegs(kvm.Regs{RIP: codeAt, RSP: stackAt, RFLAGS: 2, RCX: m.program.loops})
}

// execute runs the program and compares its answer. It returns at the latest
// a little after limit; stuck then says that the thread did not.
func (m *machine) execute(ctx context.Context) (took time.Duration, stuck bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	start := time.Now()
	done := make(chan error, 1)
	go func() { done <- m.runUntilHalt(ctx) }()
	select {
	case err := <-done:
		return time.Since(start), false, err
	case <-ctx.Done():
		m.vcpu.Kick()
	}
	select {
	case err := <-done:
		return time.Since(start), false, err
	case <-time.After(limit):
		return time.Since(start), true, fmt.Errorf("did not end within %v, nor when kicked", limit)
	}
}

func (m *machine) runUntilHalt(ctx context.Context) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	m.vcpu.Bind()
	defer m.vcpu.Unbind()
	for {
		reason, err := m.vcpu.Run()
		if err != nil {
			return err
		}
		switch reason {
		case kvm.ExitHLT:
			return m.checkAnswer()
		case kvm.ExitIntr:
			// A signal of the Go runtime unless the time is up.
			if ctx.Err() != nil {
				return fmt.Errorf("did not end: %w", ctx.Err())
			}
		case kvm.ExitInternalError:
			return errors.New(m.vcpu.InternalError().String())
		case kvm.ExitFailEntry:
			return errors.New(m.vcpu.FailEntry().String())
		default:
			return fmt.Errorf("unexpected exit %v", reason)
		}
	}
}

func (m *machine) checkAnswer() error {
	regs, err := m.vcpu.Regs()
	if err != nil {
		return err
	}
	if p := m.program; !p.anyRAX && regs.RAX != p.rax {
		return fmt.Errorf("wrong result: rax is %#x, not %#x", regs.RAX, p.rax)
	}
	return nil
}
