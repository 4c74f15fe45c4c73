package node

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// stored puts a snapshot into the node's store that nobody can run.
func stored(t *testing.T, n *Node, name string, change func(*machine.Shape)) *snapshot.Manifest {
	t.Helper()
	f, err := linux.MemoryFile("layer")
	if err != nil {
		t.Fatal(err)
	}
	l, err := layer.Seal(f, layer.SealOptions{Kind: layer.KindMemory, Units: 1, Extents: []layer.Extent{{Count: 1, Offset: layer.ZeroExtent}}})
	if err != nil {
		t.Fatal(err)
	}
	c := machine.Checkpoint{
		Shape:  machine.Shape{CPUs: 1, MemoryBytes: layer.UnitSize, GuestAgent: true},
		State:  &snapshot.State{Sections: []snapshot.Section{{ID: "vm", Data: []byte{1}}}},
		Memory: []*layer.Layer{l},
	}
	t.Cleanup(func() { c.Close() })
	change(&c.Shape)
	info, err := c.Store(t.Context(), n.store, machine.Label{Name: name, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return info.Manifest
}

// waitFor makes a process that only sleeps one that waits for VMs of a snapshot.
func waitFor(t *testing.T, n *Node, m *snapshot.Manifest, p *linux.Process) *Record {
	t.Helper()
	return waitLike(t, n, Record{Rehearsed: m.ID, Life: Life{Snapshot: m.Name}, Shape: machine.ShapeOf(m)}, p)
}

func asItIs(*machine.Shape) {}

func ended(t *testing.T, p *linux.Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// A signal is sent, not done, when the call for it returns.
	if err := p.Wait(ctx); err != nil {
		t.Error("a process waits on:", err)
	}
}

// A process that waits for VMs of one snapshot is for no other VM, and goes back to where
// it was when it was not used after all.
func TestRehearsedIsForItsSnapshot(t *testing.T) {
	n, ctx := open(t), t.Context()
	base, other := stored(t, n, "base", asItIs), stored(t, n, "other", asItIs)
	r := waitFor(t, n, base, running(t))
	d, err := n.draft(ctx, Options{Name: "any"}, planFor(r.Shape))
	if err != nil {
		t.Fatal(err)
	}
	d.abandon()
	if d.prepared != nil || count(t, n.waitingDir()) != 1 {
		t.Error("any VM takes it")
	}
	o := Options{Name: "web"}
	o.setDefaults()
	for _, c := range []struct {
		what, snapshot string
		change         func(*Options)
	}{
		{"a VM of another snapshot", other.Name, func(*Options) {}},
		{"one that is checked before", base.Name, func(o *Options) { o.Verify = true }},
	} {
		o := o
		c.change(&o)
		if vm, err := n.perform(ctx, begin(), c.snapshot, o); vm != nil || err != nil || count(t, n.waitingDir()) != 1 {
			t.Errorf("%s takes it: %v", c.what, err)
		}
	}
	networked := o
	networked.Network = &policy.Policy{Mode: policy.NoNetwork}
	if vm, err := n.perform(ctx, begin(), base.Name, networked); vm != nil || !failure.Is(err, failure.InvalidArgument) || count(t, n.waitingDir()) != 1 {
		t.Errorf("one with a network card: %v", err)
	}
	if d = n.takeOver(r); d == nil {
		t.Fatal("cannot be taken over")
	}
	d.handBack()
	if d = n.takeOver(r); d == nil {
		t.Fatal("was not handed back")
	}
	d.lock.Close() // as if who has taken it had died
	if vms, err := n.List(); err != nil || len(vms) != 0 || !exists(n.waitingPath(r)) {
		t.Errorf("%d vms are listed, and it is gone: %v", len(vms), err)
	}
	// Its socket serves nobody: it is passed over, and cleared away.
	if vm, err := n.perform(ctx, begin(), base.Name, o); vm != nil || err != nil || count(t, n.waitingDir())+count(t, n.vmsDir()) != 0 {
		t.Errorf("a dead one: %v", err)
	}
}

func TestWaitingForASnapshotEnds(t *testing.T) {
	n, ctx := open(t), t.Context()
	base, other := stored(t, n, "base", asItIs), stored(t, n, "other", asItIs)
	any, first, second, third := running(t), running(t), running(t), running(t)
	wait(t, n, 1, any)
	waitFor(t, n, base, first)
	waitFor(t, n, base, second)
	waitFor(t, n, other, third)
	prepare := func(w Waiting, left int) {
		t.Helper()
		if have, err := n.Prepare(ctx, w); err != nil || have != w.Count {
			t.Errorf("%+v: %d wait, %v", w, have, err)
		}
		if got := count(t, n.waitingDir()); got != left {
			t.Errorf("%+v: %d are left, not %d", w, got, left)
		}
	}
	prepare(Waiting{Count: 1, CPUs: 1}, 4)
	prepare(Waiting{Count: 1, Snapshot: "base"}, 3)
	prepare(Waiting{CPUs: 1}, 2)
	ended(t, any)
	// With the snapshot goes what waits for it, whoever has removed it.
	if err := n.RemoveSnapshot("base"); err != nil || count(t, n.waitingDir()) != 1 {
		t.Errorf("%d wait, %v", count(t, n.waitingDir()), err)
	}
	ended(t, first)
	ended(t, second)
	if err := n.store.Remove("other"); err != nil {
		t.Fatal(err)
	}
	stored(t, n, "other", asItIs) // another one
	prepare(Waiting{CPUs: 1}, 0)
	ended(t, third)
}

func TestWhatCannotBeRehearsed(t *testing.T) {
	n := open(t)
	stored(t, n, "plain", asItIs)
	stored(t, n, "silent", func(s *machine.Shape) { s.GuestAgent = false })
	for _, c := range []struct {
		w    Waiting
		code failure.Code
	}{
		{Waiting{Snapshot: "plain", Backend: BackendUser}, failure.InvalidArgument},
		{Waiting{Snapshot: "silent"}, failure.InvalidArgument},
		{Waiting{Snapshot: "nothing"}, failure.SnapshotNotFound},
	} {
		c.w.Count = 1
		if _, err := n.Prepare(t.Context(), c.w); !failure.Is(err, c.code) {
			t.Errorf("%+v: %v", c.w, err)
		}
	}
	if entries, err := filepath.Glob(filepath.Join(n.waitingDir(), "*")); err != nil || len(entries) != 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}
