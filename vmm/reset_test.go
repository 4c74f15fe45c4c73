package vmm

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/vmm/cpu"
	"github.com/forkvm/forkvm/vmm/memory"
)

// TestReset lets a machine with two vCPUs live several lives from one state: each
// begins with the memory, the registers and the time of that state.
func TestReset(t *testing.T) {
	testkit.NoLeaks(t)
	g := newGuest(t, Config{CPUs: 2}, memory.Config{})
	g.boot(t, count)
	g.liveOn(t)
	state, err := g.Save()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := g.memory.Freeze()
	if err != nil {
		t.Fatal(err)
	}
	defer layer.Close()
	at := g.counter(t)
	for life := range 5 {
		g.liveOn(t)
		before := g.tsc(t)
		reset := g.memory.Reset
		if life == 0 {
			reset = func() error { return g.memory.ResetTo([]memory.Layer{layer}) }
		}
		if err := reset(); err != nil {
			t.Fatal(err)
		}
		if err := g.Reset(state); err != nil {
			t.Fatal(err)
		}
		if n := g.counter(t); n != at {
			t.Errorf("life %d begins with %d, want %d", life, n, at)
		}
		if now := g.tsc(t); now >= before {
			t.Errorf("life %d: time stamp counter is %d, was %d before the reset", life, now, before)
		}
		again, err := g.Save()
		if err != nil {
			t.Fatal(err)
		}
		compareStates(t, again, state)
	}
	g.liveOn(t)
}

// liveOn runs the guest until it has counted, and pauses it.
func (g *guest) liveOn(t *testing.T) {
	t.Helper()
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	if !g.counts(t) {
		t.Fatal("guest does not count")
	}
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
}

// tsc is the first vCPU's time stamp counter.
func (g *guest) tsc(t *testing.T) uint64 {
	t.Helper()
	msr := []kvm.MSREntry{{Index: 0x10}}
	if err := g.vcpus[0].fd.MSRs(msr); err != nil {
		t.Fatal(err)
	}
	return msr[0].Data
}

// compareStates compares two states but for what goes on while a machine is
// paused: the time stamp counter, and the time that is left on timers.
func compareStates(t *testing.T, got, want *snapshot.State) {
	t.Helper()
	for i := range 2 {
		a, b := savedVCPU(t, got, i), savedVCPU(t, want, i)
		for _, s := range []*cpu.State{a, b} {
			for i := range s.MSRs {
				if s.MSRs[i].Index == 0x10 {
					s.MSRs[i].Data = 0
				}
			}
		}
		x, _ := a.MarshalBinary()
		y, _ := b.MarshalBinary()
		if !bytes.Equal(x, y) {
			t.Errorf("vcpu %d is\n%+v, want\n%+v", i, a, b)
		}
	}
	for _, name := range []string{"irqchip/0", "irqchip/1", "irqchip/2"} {
		a, _ := got.Get(name)
		b, _ := want.Get(name)
		if !bytes.Equal(a, b) {
			t.Errorf("%s is\n%x, want\n%x", name, a, b)
		}
	}
}

func savedVCPU(t *testing.T, s *snapshot.State, index int) *cpu.State {
	t.Helper()
	data, ok := s.Get(fmt.Sprintf("vcpu/%d", index))
	if !ok {
		t.Fatalf("no state of vcpu %d", index)
	}
	var state cpu.State
	if err := state.UnmarshalBinary(data); err != nil {
		t.Fatal(err)
	}
	return &state
}

func TestResetPhases(t *testing.T) {
	g := newGuest(t, Config{CPUs: 2}, memory.Config{})
	g.boot(t, count)
	state, err := g.Save()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Reset(state); err == nil {
		t.Error("a running machine was reset")
	}
	if err := g.Pause(); err != nil {
		t.Fatal(err)
	}
	cut := *state
	cut.Sections = cut.Sections[:1]
	if err := g.Reset(&cut); err == nil {
		t.Error("a state without its second vCPU was accepted")
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	if err := g.Reset(state); err == nil {
		t.Error("a closed machine was reset")
	}
}
