package vmm

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/vmm/cpu"
	"github.com/forkvm/forkvm/vmm/memory"
)

// MaxCPUs is the largest number of vCPUs of a machine.
const MaxCPUs = 32

// Errors that callers branch on.
var (
	// ErrClosed: the machine is closed.
	ErrClosed = errors.New("machine is closed")
	// ErrEnded: the guest's life is over; Exit says why.
	ErrEnded = errors.New("machine has ended")
	// ErrPhase: the call does not fit the phase of the machine's life.
	ErrPhase = errors.New("not possible in this phase of the machine's life")
)

// Addresses that KVM on Intel needs for real mode and task switches, just below
// the 4 GiB border where no RAM is (Documentation/virt/kvm/api.rst,
// KVM_SET_IDENTITY_MAP_ADDR and KVM_SET_TSS_ADDR; three pages for the TSS).
const (
	identityMapAddress = 0xfffbc000
	tssAddress         = 0xfffbd000
)

type phase int

const (
	phaseNew     phase = iota // built, nothing loaded
	phasePaused               // loaded; vCPUs parked, devices paused
	phaseRunning              // devices and vCPUs run
	phaseEnded                // the guest's life is over, resources still held
	phaseClosed               // everything is given back
)

// Config describes a machine before it has memory, devices or a guest.
type Config struct {
	// KVM is the host's KVM; the machine does not close it.
	KVM *kvm.System
	// CPUs is the number of vCPUs, 1 to MaxCPUs.
	CPUs int
	// Console, if set, gives the last lines of the guest's console for reports.
	Console func() []string
}

// Machine is one virtual machine. Its methods may be called from any goroutine;
// those that change its life are serialised.
type Machine struct {
	vm      *kvm.VM
	vcpus   []*vcpu
	policy  *cpu.Policy
	console func() []string

	// MMIO and PIO dispatch the guest's accesses. Windows are registered before
	// Start; afterwards the buses are only read.
	MMIO *devices.Bus
	PIO  *devices.Bus

	// op serialises the calls that change the machine's life, which wait for
	// threads, and guards what follows. Taken before mu.
	op      sync.Mutex
	decoded *decoded // of the last Restore or Reset, nil before

	mu      sync.Mutex // guards what follows; never held while waiting
	phase   phase
	memory  *memory.Memory
	devices []devices.Device
	exit    *Exit
	done    chan struct{} // closed when exit is set
}

// New creates the KVM virtual machine with its interrupt controllers, timer and
// vCPUs, which wait. On error nothing is left behind.
func New(c Config) (*Machine, error) {
	if c.CPUs < 1 || c.CPUs > MaxCPUs {
		return nil, fmt.Errorf("create machine: %d vCPUs: between 1 and %d are possible", c.CPUs, MaxCPUs)
	}
	policy, err := cpu.NewPolicy(c.KVM, c.CPUs)
	if err != nil {
		return nil, fmt.Errorf("create machine: %w", err)
	}
	vm, err := c.KVM.CreateVM()
	if err != nil {
		return nil, fmt.Errorf("create machine: %w", err)
	}
	m := &Machine{
		vm:      vm,
		policy:  policy,
		console: c.Console,
		MMIO:    devices.NewBus(),
		PIO:     devices.NewBus(),
		done:    make(chan struct{}),
	}
	if err := m.build(c.CPUs); err != nil {
		m.Close()
		return nil, fmt.Errorf("create machine: %w", err)
	}
	return m, nil
}

// build gives the virtual machine its controllers and vCPUs. The irqchip comes
// first: a vCPU created before it would get no local APIC.
func (m *Machine) build(cpus int) error {
	if err := m.vm.SetIdentityMapAddr(identityMapAddress); err != nil {
		return err
	}
	if err := m.vm.SetTSSAddr(tssAddress); err != nil {
		return err
	}
	if err := m.vm.CreateIRQChip(); err != nil {
		return err
	}
	if err := m.vm.CreatePIT2(kvm.PITSpeakerDummy); err != nil {
		return err
	}
	for i := range cpus {
		v, err := newVCPU(m, i)
		if err != nil {
			return err
		}
		m.vcpus = append(m.vcpus, v)
		if err := m.policy.Prepare(v.fd, i); err != nil {
			return err
		}
		v.start()
	}
	return nil
}

// SetMemory makes guest RAM visible to the guest. The machine uses it until
// Close and does not close it.
func (m *Machine) SetMemory(mem *memory.Memory) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != phaseNew || m.memory != nil {
		return fmt.Errorf("set memory: %w", m.phaseErrorLocked())
	}
	for i, r := range mem.Regions() {
		err := m.vm.SetUserMemoryRegion(kvm.MemoryRegion{
			Slot:        uint32(i),
			GuestPhys:   r.GuestPhys,
			Size:        r.Size,
			HostAddress: mem.HostAddress(i),
		})
		if err != nil {
			return fmt.Errorf("set memory (slot %d): %w", i, err)
		}
	}
	m.memory = mem
	return nil
}

// Attach adds a device to the machine's life. Devices resume in the order in
// which they are attached and pause in the reverse order. The machine closes
// them.
func (m *Machine) Attach(d devices.Device) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != phaseNew {
		return fmt.Errorf("attach device (%s): %w", d.ID(), m.phaseErrorLocked())
	}
	for _, have := range m.devices {
		if have.ID() == d.ID() {
			return fmt.Errorf("attach device (%s): the machine has one of this name", d.ID())
		}
	}
	m.devices = append(m.devices, d)
	return nil
}

// Boot sets the state in which a kernel is entered: the first vCPU at its entry
// point, the others waiting for their start-up interrupt.
func (m *Machine) Boot(entry cpu.Entry) error {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phaseNew); err != nil {
		return fmt.Errorf("boot machine: %w", err)
	}
	for _, v := range m.vcpus {
		if err := cpu.Reset(v.fd, v.index, entry); err != nil {
			return fmt.Errorf("boot machine: reset vcpu (%d): %w", v.index, err)
		}
	}
	m.setPhase(phasePaused)
	return nil
}

// Start lets the guest run. It is Resume by the name that a reader expects the
// first time.
func (m *Machine) Start() error { return m.Resume() }

// Done is closed when the guest's life is over.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Exit returns the report of the end, nil before it.
func (m *Machine) Exit() *Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// End ends the guest's life for a reason that a device or the owner gives. The
// first reason counts. It does not wait: it is called from vCPU threads and
// device workers.
func (m *Machine) End(reason Reason, detail string) {
	m.end(&Exit{Reason: reason, VCPU: m.currentVCPU(), Detail: detail})
}

// currentVCPU returns the index of the vCPU on whose thread it is called, as a
// device's register handlers are, or -1.
func (m *Machine) currentVCPU() int {
	tid := int64(unix.Gettid())
	for _, v := range m.vcpus {
		if v.tid.Load() == tid {
			return v.index
		}
	}
	return -1
}

// end is called for a vCPU on its own thread only, where its registers can be
// read.
func (m *Machine) end(e *Exit) {
	if m.console != nil {
		e.Console = m.console()
	}
	e.refine()
	if e.VCPU >= 0 && !e.Reason.Orderly() {
		e.Registers = m.vcpus[e.VCPU].dump()
	}
	m.mu.Lock()
	first := m.exit == nil
	if first {
		m.exit = e
		if m.phase != phaseClosed {
			m.phase = phaseEnded
		}
	}
	m.mu.Unlock()
	if !first {
		return
	}
	for _, v := range m.vcpus {
		v.ask(vcpuEnded)
	}
	close(m.done)
}

// Close ends the guest if it still runs, waits for every vCPU thread and device
// and gives all resources back. It is idempotent.
func (m *Machine) Close() error {
	m.op.Lock()
	defer m.op.Unlock()
	m.mu.Lock()
	closed := m.phase == phaseClosed
	m.phase = phaseClosed
	m.mu.Unlock()
	if closed {
		return nil
	}
	m.End(ReasonKilled, "")
	for _, v := range m.vcpus {
		v.join()
	}
	var errs []error
	for i := len(m.devices) - 1; i >= 0; i-- {
		errs = append(errs, m.devices[i].Close())
	}
	for _, v := range m.vcpus {
		errs = append(errs, v.fd.Close())
	}
	errs = append(errs, m.vm.Close())
	return errors.Join(errs...)
}

func (m *Machine) setPhase(p phase) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.phase != phaseEnded && m.phase != phaseClosed {
		m.phase = p
	}
}

// expect returns an error unless the machine is in one of the phases.
func (m *Machine) expect(phases ...phase) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range phases {
		if m.phase == p {
			return nil
		}
	}
	return m.phaseErrorLocked()
}

func (m *Machine) phaseErrorLocked() error {
	switch m.phase {
	case phaseClosed:
		return ErrClosed
	case phaseEnded:
		return fmt.Errorf("%w: %w", ErrEnded, m.exit)
	}
	return ErrPhase
}
