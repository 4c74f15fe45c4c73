package node

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// wait makes a waiting process of one that only sleeps.
func wait(t *testing.T, n *Node, cpus int, p *linux.Process) *Record {
	t.Helper()
	return waitLike(t, n, Record{Shape: machine.Shape{CPUs: cpus}}, p)
}

// waitLike is wait for a process that is to be recorded like this.
func waitLike(t *testing.T, n *Node, like Record, p *linux.Process) *Record {
	t.Helper()
	like.ID = newID()
	d, err := n.newDirectory(n.waitingPath(&like), like.ID)
	if err != nil {
		t.Fatal(err)
	}
	d.record.Shape, d.record.Rehearsed, d.record.Snapshot = like.Shape, like.Rehearsed, like.Snapshot
	if err := d.launched(p); err != nil {
		t.Fatal(err)
	}
	d.lock.Close()
	return &d.record
}

func planFor(s machine.Shape) plan { return plan{checkpoint: &machine.Checkpoint{Shape: s}} }

func count(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// Whoever takes a waiting process over and dies before the VM has a name leaves
// it to others.
func TestHalfAdoptedProcessWaitsAgain(t *testing.T) {
	n := open(t)
	r := wait(t, n, 1, running(t))
	d := n.takeOver(r)
	if d == nil {
		t.Fatal("cannot be taken over")
	}
	if n.takeOver(r) != nil {
		t.Error("was taken over twice")
	}
	if vms, err := n.List(); err != nil || len(vms) != 0 || count(t, n.vmsDir()) != 1 {
		t.Errorf("%d vms are listed of %d, %v", len(vms), count(t, n.vmsDir()), err)
	}
	d.lock.Close()
	if vms, err := n.List(); err != nil || len(vms) != 0 {
		t.Errorf("%d vms are listed, %v", len(vms), err)
	}
	if waiting, err := n.WaitingProcesses(); err != nil || len(waiting) != 1 || waiting[0].ID != r.ID {
		t.Errorf("%v wait, %v", waiting, err)
	}
}

func TestPrepareEndsWhatIsTooMuch(t *testing.T) {
	n := open(t)
	for _, c := range []struct{ cpus, count, left int }{{1, 1, 3}, {4, 0, 2}, {0, 0, 0}} {
		if count(t, n.waitingDir()) == 0 {
			for _, cpus := range []int{1, 1, 2, 4} {
				wait(t, n, cpus, running(t))
			}
		}
		if have, err := n.Prepare(context.Background(), Waiting{Count: c.count, CPUs: c.cpus}); err != nil || have != c.count {
			t.Errorf("%d wait, %v", have, err)
		}
		if left := count(t, n.waitingDir()); left != c.left {
			t.Errorf("%d vCPUs, %d processes: %d are left, not %d", c.cpus, c.count, left, c.left)
		}
	}
	if left := count(t, n.vmsDir()); left != 0 {
		t.Errorf("%d directories of vms", left)
	}
}

// waitWithCard makes a waiting process for VMs with a network card.
func waitWithCard(t *testing.T, n *Node, backend Backend, mtu int) *Record {
	t.Helper()
	r := wait(t, n, 1, running(t))
	_, program, err := n.command(backend == BackendUser)
	if err != nil {
		t.Fatal(err)
	}
	r.Program, r.Shape.NetworkMTU = program, mtu
	if err := r.write(filepath.Join(n.waitingDir(), r.ID)); err != nil {
		t.Fatal(err)
	}
	if backend == BackendTap {
		if err := os.WriteFile(n.tapFile(r.ID), []byte(`{"settings":4000000000}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// Processes are told apart by the network card that they wait with, and leave nothing of it.
func TestPrepareTellsCardsApart(t *testing.T) {
	n := open(t)
	n.config.NetworkCommand = n.config.Command
	wait(t, n, 1, running(t))
	waitWithCard(t, n, BackendUser, 1500)
	waitWithCard(t, n, BackendTap, 1500)
	waitWithCard(t, n, BackendTap, 9000)
	card := func(backend Backend, mtu int) Waiting { return Waiting{CPUs: 1, Backend: backend, NetworkMTU: mtu} }
	for i, w := range []Waiting{card(BackendTap, 1280), card(BackendTap, 0), card(BackendUser, 0), {CPUs: 1}, card(BackendTap, 9000)} {
		if have, err := n.Prepare(t.Context(), w); err != nil || have != 0 {
			t.Errorf("%+v: %d wait, %v", w, have, err)
		}
		if left := count(t, n.waitingDir()); left != 4-i {
			t.Errorf("%+v: %d are left, not %d", w, left, 4-i)
		}
	}
	if left := count(t, n.groupsDir()); left != 0 {
		t.Errorf("%d networks are on record", left)
	}
}

// One that waits with a network that nobody finds, with another card, or under another's watch, is not made a VM.
func TestDraftWithoutTheNetwork(t *testing.T) {
	n := open(t)
	n.config.NetworkCommand = n.config.Command
	broken := waitWithCard(t, n, BackendTap, 1500)
	if err := os.WriteFile(n.tapFile(broken.ID), []byte("no record"), 0o600); err != nil {
		t.Fatal(err)
	}
	waitWithCard(t, n, BackendTap, 9000)
	watched := waitWithCard(t, n, BackendUser, 1500)
	watched.Enforcement = &Enforcement{By: EnforceKernel}
	if err := watched.write(filepath.Join(n.waitingDir(), watched.ID)); err != nil {
		t.Fatal(err)
	}
	for _, o := range []Options{{Backend: BackendTap, Enforce: EnforceAuto}, {Backend: BackendUser, Enforce: EnforceUser}, {}} {
		d, err := n.draft(t.Context(), o, planFor(machine.Shape{CPUs: 1, NetworkMTU: 1500}))
		if err != nil {
			t.Fatal(err)
		}
		if d.record.PID != 0 {
			t.Errorf("%+v: made of a process that waits", o)
		}
		d.abandon()
	}
	if left := count(t, n.waitingDir()); left != 2 {
		t.Errorf("%d wait", left)
	}
	if exists(n.tapFile(broken.ID)) {
		t.Error("the record that is none is there")
	}
}

func TestDeadAndForeignWaitingProcesses(t *testing.T) {
	n := open(t)
	p := running(t)
	r := wait(t, n, 1, p)
	r.Started++ // the number has passed to another process
	if err := r.write(filepath.Join(n.waitingDir(), r.ID)); err != nil {
		t.Fatal(err)
	}
	foreign := running(t)
	other := wait(t, n, 1, foreign)
	other.Program = "another build"
	if err := other.write(filepath.Join(n.waitingDir(), other.ID)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Prepare(context.Background(), Waiting{CPUs: 1}); err != nil {
		t.Error(err)
	}
	if left := count(t, n.waitingDir()); left != 0 {
		t.Errorf("%d are left", left)
	}
	if alive, err := p.Running(); err != nil || !alive {
		t.Error("the process with the recycled number was harmed")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// A signal is sent, not done, when the call for it returns.
	if err := foreign.Wait(ctx); err != nil {
		t.Error("the process of another build waits on:", err)
	}
}

// A process whose socket nobody serves is passed over.
func TestDraftWithoutTheWaiting(t *testing.T) {
	n := open(t)
	wait(t, n, 1, running(t))
	d, err := n.draft(context.Background(), Options{Name: "web"}, planFor(machine.Shape{CPUs: 1}))
	if err != nil {
		t.Fatal(err)
	}
	defer d.abandon()
	if d.prepared != nil || d.record.Name != "web" || d.record.PID != 0 {
		t.Errorf("draft %+v", d.record)
	}
	if count(t, n.waitingDir()) != 0 || count(t, n.vmsDir()) != 1 {
		t.Error("the dead one was not cleared away")
	}
}

// Whoever sweeps removes a directory whose maker was killed before it had the lock, and never stops one who lives.
func TestSweptWhileItIsMade(t *testing.T) {
	n := open(t)
	if err := os.Mkdir(filepath.Join(n.waitingDir(), "0123456789ab"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := n.WaitingProcesses(); err != nil || exists(filepath.Join(n.waitingDir(), "0123456789ab")) {
		t.Errorf("an empty directory is left, %v", err)
	}
	stop, swept := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(swept)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = n.WaitingProcesses()
			}
		}
	}()
	for range 200 {
		id := newID()
		d, err := n.newDirectory(filepath.Join(n.waitingDir(), id), id)
		if err != nil {
			t.Fatal(err)
		}
		if !exists(filepath.Join(d.dir, lockFile)) {
			t.Error("a directory in the making was removed")
		}
		d.abandon()
	}
	close(stop)
	<-swept
}
