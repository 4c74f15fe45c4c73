package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/kvm"
)

// floor measures what no monitor can be faster than: the calls of KVM that a
// virtual machine needs to exist and to run its first instruction, with no
// process, device, state or guest agent. It runs in this process.
func (b *bench) floor(context.Context) error {
	var samples []float64
	var c course
	for i := range b.config.Rounds + 1 {
		begin := time.Now()
		bare, err := newBare(standardMemory, &c, i > 0)
		took := time.Since(begin)
		if err := errors.Join(err, bare.close()); err != nil {
			return err
		}
		if i > 0 {
			samples = append(samples, ms(took))
		}
		time.Sleep(settle)
	}
	b.row("floor_create", CMS, samples)
	b.phases = append(b.phases, c.breakdown("floor"))
	return nil
}

// bare is a virtual machine with one processor, memory and nothing else.
type bare struct {
	system *kvm.System
	vm     *kvm.VM
	vcpu   *kvm.VCPU
	memory *linux.Mapping
}

// newBare makes it and runs one instruction, which writes to a port.
func newBare(size uint64, c *course, count bool) (bare, error) {
	var b bare
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"open", func() (err error) { b.system, err = kvm.Open(); return err }},
		{"kvm", func() (err error) { b.vm, err = b.system.CreateVM(); return err }},
		{"irqchip", b.addControllers},
		{"vcpu", func() (err error) { b.vcpu, err = b.vm.CreateVCPU(0); return err }},
		{"map", func() error { return b.addMemory(size) }},
		{"run", b.run},
	} {
		begin := time.Now()
		if err := step.do(); err != nil {
			return b, err
		}
		if count {
			c.step(step.name, ms(time.Since(begin)))
		}
	}
	return b, nil
}

func (b *bare) addControllers() error {
	if err := b.vm.SetTSSAddr(0xfffbd000); err != nil {
		return err
	}
	if err := b.vm.CreateIRQChip(); err != nil {
		return err
	}
	return b.vm.CreatePIT2(0)
}

func (b *bare) addMemory(size uint64) (err error) {
	if b.memory, err = linux.Reserve(size); err != nil {
		return err
	}
	return b.vm.SetUserMemoryRegion(kvm.MemoryRegion{Size: size, HostAddress: b.memory.Address()})
}

func (b *bare) run() error {
	copy(b.memory.Bytes(), []byte{0xe6, 0x80, 0xf4}) // out 0x80, al; hlt
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.vcpu.Bind()
	defer b.vcpu.Unbind()
	sregs, err := b.vcpu.Sregs()
	if err != nil {
		return err
	}
	sregs.CS.Base, sregs.CS.Selector = 0, 0
	if err := errors.Join(b.vcpu.SetSregs(sregs), b.vcpu.SetRegs(kvm.Regs{RFLAGS: 2})); err != nil {
		return err
	}
	for {
		switch reason, err := b.vcpu.Run(); {
		case err != nil:
			return err
		case reason == kvm.ExitIO:
			return nil
		case reason != kvm.ExitIntr:
			return fmt.Errorf("bare machine: unexpected %v", reason)
		}
	}
}

// close gives back what there is; the machine goes before its memory.
func (b *bare) close() error {
	var errs []error
	if b.vcpu != nil {
		errs = append(errs, b.vcpu.Close())
	}
	if b.vm != nil {
		errs = append(errs, b.vm.Close())
	}
	if b.memory != nil {
		errs = append(errs, b.memory.Unmap())
	}
	if b.system != nil {
		errs = append(errs, b.system.Close())
	}
	return errors.Join(errs...)
}
