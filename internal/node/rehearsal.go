package node

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/snapshot"
)

// A process that waits for VMs of one snapshot has rehearsed: it has lived a life of it,
// which is thrown away, and has been put back to its beginning. What a create is most of
// its time about, first uses of pages, is behind it; so are those that a verdict makes,
// once one with the snapshot has noted them.

// throwaway is the hostname of the life that is thrown away.
const throwaway = "rehearsal"

// rehearse lets the draft's process live a life of the snapshot on record, and lets go of
// it.
func (d *draft) rehearse(ctx context.Context) error {
	n := d.node
	checkpoint, manifest, err := n.openForClone(ctx, d.record.Snapshot, false)
	if err != nil {
		return err
	}
	defer checkpoint.Close()
	if manifest.ID != d.record.Rehearsed {
		return failure.New(failure.SnapshotNotFound, "snapshot %s was replaced by another one", manifest.Name)
	}
	// Of the clones of a snapshot with which is judged most are those in which is judged.
	checkpoint.UseJudgingSet(n.store, manifest, false)
	release, err := n.admit(machine.Demand{VMs: 1, RAM: checkpoint.Shape.MemoryBytes})
	if err != nil {
		return err
	}
	defer release()
	config := process.RehearsalConfig{
		Checkpoint:   checkpoint,
		Identity:     machine.NewIdentity(throwaway, machine.TimeHost),
		ReadyTimeout: DefaultReadyTimeout,
	}
	if d.backend != "" {
		config.Network = &process.NetworkConfig{Policy: policy.Policy{Mode: policy.NoNetwork}}
	}
	if d.tap != nil {
		config.Tap = d.tapAddressing()
	}
	if config.Tops, err = machine.NewTops(checkpoint.Shape, n.tmpDir()); err != nil {
		return err
	}
	defer linux.CloseFiles(config.Tops...)
	if config.Next, err = machine.NewTops(checkpoint.Shape, n.tmpDir()); err != nil {
		return err
	}
	defer linux.CloseFiles(config.Next...)
	return d.prepared.Rehearse(ctx, config)
}

// rehearsable is the manifest of a snapshot for which processes can wait.
func (n *Node) rehearsable(name string) (*snapshot.Manifest, error) {
	name, err := n.snapshotName(name)
	if err != nil {
		return nil, err
	}
	m, err := n.store.Stat(name)
	switch {
	case err != nil:
		return nil, snapshotFailure(err)
	case !m.Guest.GuestAgent:
		return nil, failure.New(failure.InvalidArgument, "snapshot %s has no guest agent, which says when a guest is ready", name)
	}
	return m, nil
}

// backendOf is what is behind the card of VMs of a snapshot, if it has one, of which nobody
// may have said what.
func backendOf(m *snapshot.Manifest, said Backend) (Backend, error) {
	switch {
	case m.Guest.NetworkMTU == 0 && said != "":
		return "", failure.New(failure.InvalidArgument, "snapshot %s has no network card", m.Name)
	case m.Guest.NetworkMTU != 0 && said == "":
		return BackendUser, nil
	}
	return said, nil
}

// perform makes a VM of a process that has rehearsed the snapshot. It returns nil if there
// is none for such a VM.
func (n *Node) perform(ctx context.Context, course course, snapshotName string, o Options) (*VM, error) {
	if o.Verify || !n.anyRehearsed() {
		return nil, nil
	}
	m, err := n.store.Stat(snapshotName)
	if err != nil {
		return nil, snapshotFailure(err)
	}
	shape := machine.ShapeOf(m)
	card, err := o.card(shape)
	if err != nil {
		return nil, err
	}
	config := process.StartConfig{Network: card.network}
	if o.judges != nil {
		if config.WorkingSet = n.store.JudgingSet(m, false); config.WorkingSet == nil {
			return nil, nil // a clone that is made in the usual way records it first
		}
		defer config.WorkingSet.Close()
	}
	release, err := n.admit(o.demand(1, m.Guest.MemoryBytes))
	if err != nil {
		return nil, err
	}
	defer release()
	course.End(phaseSnapshot)
	fits := func(r *Record) bool { return r.waitsFor(m) && n.fitsRehearsed(r, &o, shape) }
	d, err := n.adoptAny(ctx, o, m.ID, m.Guest.MemoryBytes, fits)
	if d == nil {
		return nil, err
	}
	d.give(card, &o)
	return d.begin(ctx, o, planOf(course, m), config)
}

// anyRehearsed reports whether there is such a process for any snapshot.
func (n *Node) anyRehearsed() bool {
	entries, err := os.ReadDir(n.waitingDir())
	return err == nil && slices.ContainsFunc(entries, func(e os.DirEntry) bool { return len(e.Name()) > 2*idBytes })
}

// rehearsedAs is the ID of the snapshot that the VM came from, whose processes can become
// its children; empty if there are none.
func (vm *VM) rehearsedAs() string {
	if vm.Record.Snapshot == "" || !vm.node.anyRehearsed() {
		return ""
	}
	m, err := vm.node.store.Stat(vm.Record.Snapshot)
	if err != nil || !slices.Contains(vm.Lineage, m.ID) {
		return "" // it was removed, and another one may have its name
	}
	return m.ID
}

// isOrphaned reports whether a process waits for a snapshot that is not there any more.
func (n *Node) isOrphaned(r *Record) bool {
	if r.Rehearsed == "" {
		return false
	}
	m, err := n.store.Stat(r.Snapshot)
	return err != nil || !r.waitsFor(m)
}

// waitsFor reports whether a process waits for VMs of a snapshot. Whoever makes an archive
// can give it another one's ID, but not its name beside it.
func (r *Record) waitsFor(m *snapshot.Manifest) bool {
	return r.Rehearsed == m.ID && r.Snapshot == m.Name
}

// endRehearsed ends the processes that wait for a snapshot. It is gone already, so that
// nobody prepares others.
func (n *Node) endRehearsed(m *snapshot.Manifest) error {
	waiting, err := n.WaitingProcesses()
	if err != nil {
		return fmt.Errorf("end what waits for the snapshot: %w", err)
	}
	for _, r := range waiting {
		if r.waitsFor(m) {
			n.endWaiting(r)
		}
	}
	return nil
}
