package cpu

import (
	"encoding/binary"
	"errors"
	"reflect"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/kvm"
)

// Guests here are a few instructions of 32-bit code.
const (
	guestSize = 64 << 10
	codeAt    = 0x1000
)

// machine is the least a vCPU needs around it.
type machine struct {
	policy *Policy
	vm     *kvm.VM
	vcpus  []*kvm.VCPU
	memory []byte
}

func openKVM(t *testing.T) *kvm.System {
	t.Helper()
	if testkit.InLab() {
		testkit.RequireKVM(t)
	}
	sys, err := kvm.Open()
	if err != nil {
		testkit.Require(t, "kvm", err.Error())
	}
	t.Cleanup(func() { sys.Close() })
	return sys
}

// newMachine has prepared vCPUs.
func newMachine(t *testing.T, sys *kvm.System, cpus int) *machine {
	t.Helper()
	m := &machine{}
	var err error
	if m.policy, err = NewPolicy(sys, cpus); err != nil {
		t.Fatal(err)
	}
	m.memory, err = unix.Mmap(-1, 0, guestSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m.memory) })
	if m.vm, err = sys.CreateVM(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.vm.Close() })
	if err := m.vm.SetTSSAddr(0xfffbd000); err != nil {
		t.Fatal(err)
	}
	if err := m.vm.CreateIRQChip(); err != nil {
		t.Fatal(err)
	}
	err = m.vm.SetUserMemoryRegion(kvm.MemoryRegion{Size: guestSize, HostAddress: hostAddress(m.memory)})
	if err != nil {
		t.Fatal(err)
	}
	for i := range cpus {
		v, err := m.vm.CreateVCPU(i)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.policy.Prepare(v, i); err != nil {
			t.Fatal(err)
		}
		m.vcpus = append(m.vcpus, v)
	}
	return m
}

// flatEntry is 32-bit protected mode at codeAt.
func flatEntry() Entry { return Entry{Address: codeAt, StartInfo: 0x1234} }

func (m *machine) reset(t *testing.T) {
	t.Helper()
	for i, v := range m.vcpus {
		if err := Reset(v, i, flatEntry()); err != nil {
			t.Fatal(err)
		}
	}
}

func (m *machine) save(t *testing.T) []*State {
	t.Helper()
	var states []*State
	for _, v := range m.vcpus {
		s, err := m.policy.Save(v)
		if err != nil {
			t.Fatal(err)
		}
		states = append(states, throughBytes(t, s))
	}
	return states
}

func (m *machine) restore(t *testing.T, states []*State) {
	t.Helper()
	for i, v := range m.vcpus {
		if err := m.policy.Restore(v, states[i]); err != nil {
			t.Fatal(err)
		}
	}
}

func throughBytes(t *testing.T, s *State) *State {
	t.Helper()
	data, err := s.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	got := &State{}
	if err := got.UnmarshalBinary(data); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, s) {
		t.Errorf("binary form lost something: %+v, want %+v", got, s)
	}
	t.Logf("vcpu %d: %d bytes, %d msrs, %d cpuid entries", s.ID, len(data), len(s.MSRs), len(s.CPUID))
	return got
}

// What was restored and is saved again is what was restored, except time.
func TestSaveRestoreSave(t *testing.T) {
	sys := openKVM(t)
	first := newMachine(t, sys, 3)
	first.reset(t)
	states := first.save(t)
	if s := states[0]; s.Regs.RIP != codeAt || s.Regs.RBX != 0x1234 || s.MPState != kvm.MPStateRunnable {
		t.Errorf("vcpu 0: %+v, %v", s.Regs, s.MPState)
	}
	for _, s := range states[1:] {
		if s.MPState != kvm.MPStateUninitialized {
			t.Errorf("vcpu %d: %v", s.ID, s.MPState)
		}
	}
	second := newMachine(t, sys, 3)
	second.restore(t, states)
	for i, got := range second.save(t) {
		want := states[i]
		for _, s := range []*State{got, want} {
			if p := s.msr(msrTSC); p != nil {
				*p = 0
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("vcpu %d:\ngot  %+v\nwant %+v", i, got, want)
		}
	}
}

// A guest that was stopped somewhere goes on there, in another VM.
func TestRestoredGuestGoesOn(t *testing.T) {
	sys := openKVM(t)
	code := []byte{
		0x43,       // inc ebx
		0x89, 0x1d, // mov [0x3000], ebx
		0x00, 0x30, 0x00, 0x00,
		0xeb, 0xf7, // jmp back
	}
	first := newMachine(t, sys, 1)
	copy(first.memory[codeAt:], code)
	first.reset(t)
	first.runBeyond(t, 0x1234)
	states := first.save(t)
	second := newMachine(t, sys, 1)
	copy(second.memory, first.memory)
	second.restore(t, states)
	second.runBeyond(t, uint32(states[0].Regs.RBX))
	regs, err := second.vcpus[0].Regs()
	if err != nil || regs.RBX <= states[0].Regs.RBX || regs.RIP < codeAt || regs.RIP >= codeAt+uint64(len(code)) {
		t.Errorf("ebx %#x at %#x (%v), was %#x", regs.RBX, regs.RIP, err, states[0].Regs.RBX)
	}
}

// runBeyond runs vCPU 0 on its own thread until the counter that the guest
// keeps at 0x3000 has passed a value, and kicks it out. The pauses between
// kicks grow: on a slow machine a guest needs time to get anywhere at all.
func (m *machine) runBeyond(t *testing.T, count uint32) {
	t.Helper()
	v := m.vcpus[0]
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		v.Bind()
		defer v.Unbind()
		for limit := time.Now().Add(time.Minute); ; {
			v.SetImmediateExit(false)
			reason, err := v.Run()
			switch {
			case err != nil:
			case reason != kvm.ExitIntr:
				err = errors.New(reason.String())
			case time.Now().After(limit):
				err = errors.New("guest gets nowhere")
			case binary.LittleEndian.Uint32(m.memory[0x3000:]) <= count:
				continue
			}
			done <- err
			return
		}
	}()
	for pause := time.Millisecond; ; pause *= 2 {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		case <-time.After(pause):
			v.Kick()
		}
	}
}

func TestRestoreRefuses(t *testing.T) {
	sys := openKVM(t)
	source := newMachine(t, sys, 2)
	source.reset(t)
	for _, tc := range []struct {
		name   string
		change func(*State)
		as     any
	}{
		{"another vcpu", func(s *State) { s.ID = 1 }, nil},
		{"a feature this host lacks", func(s *State) { cpuid(s.CPUID).find(7, 0).ECX |= 1 << 15 }, new(*IncompatibleError)},
		{"a register KVM does not know", func(s *State) { s.MSRs = append(s.MSRs, kvm.MSREntry{Index: 0x12345678}) }, new(*kvm.MSRError)},
		{"control bits that do not exist", func(s *State) { s.Sregs.CR4 = 1 << 40 }, nil},
		{"too many extended control registers", func(s *State) { s.XCRs = make([]kvm.XCR, 17) }, nil},
		{"no such mp state", func(s *State) { s.MPState = 77 }, nil},
	} {
		s := source.save(t)[0]
		tc.change(s)
		target := newMachine(t, sys, 2)
		err := target.policy.Restore(target.vcpus[0], s)
		if err == nil {
			t.Errorf("%s: restored", tc.name)
			continue
		}
		t.Logf("%s: %v", tc.name, err)
		if tc.as != nil && !errors.As(err, tc.as) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func TestPolicyRefuses(t *testing.T) {
	sys := openKVM(t)
	for _, cpus := range []int{0, -1, 256} {
		if _, err := NewPolicy(sys, cpus); err == nil {
			t.Errorf("%d vcpus are no error", cpus)
		}
	}
	m := newMachine(t, sys, 1)
	if err := m.policy.Prepare(m.vcpus[0], 1); err == nil {
		t.Error("preparing a vcpu the machine does not have is no error")
	}
	fresh, err := NewPolicy(sys, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fresh.Save(m.vcpus[0]); err == nil {
		t.Error("saving a vcpu that was not prepared is no error")
	}
}
