package node

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Snapshot is what taking one yields.
type Snapshot struct {
	store.Info
	// Pause is how long the VM stood still.
	Pause time.Duration
}

// Snapshot freezes the VM under a name, optionally for a task. The VM goes on
// while layers are written; one that was paused stays so. Without a name it makes
// one of the VM's and a number. The snapshot's parent is the one that the VM last
// took or came from.
func (vm *VM) Snapshot(ctx context.Context, name, task string) (*Snapshot, error) {
	if IsStep(name) {
		return nil, failure.New(failure.InvalidArgument, "snapshot name %q is one of a rollout's step; choose another", name)
	}
	s, err := vm.takeSnapshot(ctx, name, task)
	if err == nil {
		_, err = vm.Note(journal.EventSnapshot, journal.Snapshot{Name: s.Manifest.Name, ID: s.Manifest.ID, PauseMS: milliseconds(s.Pause)})
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// takeSnapshot is Snapshot without a line in the journal.
func (vm *VM) takeSnapshot(ctx context.Context, name, task string) (s *Snapshot, err error) {
	err = vm.change(ctx, func(r *Record) error {
		if s, err = vm.snapshot(ctx, name, machine.Label{Task: task, Lineage: r.Lineage}); err != nil {
			return err
		}
		r.Standing = standingOn(s.Manifest)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

func standingOn(m *snapshot.Manifest) Standing {
	return Standing{LastSnapshot: m.Name, Lineage: m.Lineage()}
}

func (vm *VM) snapshot(ctx context.Context, name string, label machine.Label) (*Snapshot, error) {
	label.Name, label.Version = name, vm.node.config.Version
	if name == "" {
		next, err := vm.node.nextName(vm.Name)
		if err != nil {
			return nil, err
		}
		label.Name = next
	}
	// Asked before the VM is stopped for nothing.
	if _, err := vm.node.store.Stat(label.Name); err == nil {
		return nil, failure.New(failure.SnapshotExists, "a snapshot named %q exists: remove it first, or choose another name", label.Name)
	}
	if err := (machine.Demand{Freeze: true}).Check(vm.PID, 0); err != nil {
		return nil, fmt.Errorf("snapshot vm (%s): %w", vm.Name, limitFailure(err))
	}
	head, err := vm.head()
	if err != nil {
		return nil, err
	}
	if head.Seq > 0 {
		label.Journal = &snapshot.JournalHead{Rollout: vm.ID, Seq: head.Seq, Hash: head.Hash}
	}
	checkpoint, err := vm.checkpoint(ctx)
	if err != nil {
		return nil, err
	}
	defer checkpoint.Close()
	info, err := checkpoint.Store(ctx, vm.node.store, label)
	if err != nil {
		return nil, snapshotFailure(err)
	}
	return &Snapshot{Info: *info, Pause: checkpoint.Pause}, nil
}

// nextName is the first name of a series that no snapshot of it comes after:
// "vm-1", "vm-2", ….
func (n *Node) nextName(series string) (string, error) {
	names, err := n.store.Names()
	if err != nil {
		return "", failure.As(failure.Internal, err)
	}
	last := 0
	for _, name := range names {
		rest, found := strings.CutPrefix(name, series+"-")
		if number, err := strconv.Atoi(rest); found && err == nil {
			last = max(last, number)
		}
	}
	return fmt.Sprintf("%s-%d", series, last+1), nil
}

// Snapshots lists the node's snapshots by name, damaged ones too.
func (n *Node) Snapshots() ([]store.Info, error) {
	infos, err := n.store.List()
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return infos, nil
}

// InspectSnapshot returns what a snapshot says about itself, and its sizes.
func (n *Node) InspectSnapshot(name string) (store.Info, error) {
	name, err := n.snapshotName(name)
	if err != nil {
		return store.Info{}, err
	}
	info, err := n.store.Inspect(name)
	if err != nil {
		return info, snapshotFailure(err)
	}
	return info, nil
}

// openSnapshot opens a snapshot or a rollout's step.
func (n *Node) openSnapshot(ref string) (*store.Snapshot, error) {
	name, err := n.snapshotName(ref)
	if err != nil {
		return nil, err
	}
	s, err := n.store.Open(name)
	if err != nil {
		return nil, snapshotFailure(err)
	}
	return s, nil
}

// CheckSnapshot checks all of a snapshot: manifest, state, indices and, by the
// verification, data.
func (n *Node) CheckSnapshot(ctx context.Context, name string, v *store.Verification) error {
	s, err := n.openSnapshot(name)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := v.Check(ctx, s); err != nil {
		return snapshotFailure(err)
	}
	return nil
}

// DiffSnapshots says which pages and blocks two snapshots hold differently.
func (n *Node) DiffSnapshots(ctx context.Context, a, b string) (*store.Difference, error) {
	left, err := n.openSnapshot(a)
	if err != nil {
		return nil, err
	}
	defer left.Close()
	right, err := n.openSnapshot(b)
	if err != nil {
		return nil, err
	}
	defer right.Close()
	d, err := store.Diff(ctx, left, right)
	if err != nil {
		return nil, snapshotFailure(err)
	}
	return d, nil
}

// RemoveSnapshot removes a snapshot. VMs and snapshots made from it go on; processes that
// wait for VMs of it end.
func (n *Node) RemoveSnapshot(name string) error {
	name, err := n.snapshotName(name)
	if err != nil {
		return err
	}
	// What there is of one that is too damaged to say its id goes when others are made.
	m, unknown := n.store.Stat(name)
	if unknown == nil {
		err = n.dropHuge(m.ID)
	}
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("remove snapshot (%s): %w", name, err))
	}
	if err := n.store.Remove(name); err != nil {
		return snapshotFailure(err)
	}
	if unknown == nil {
		err = n.endRehearsed(m)
	}
	return err
}

// damaged reports whether bytes at rest are not what they should be.
func damaged(err error) bool {
	for _, reason := range []error{snapshot.ErrMagic, snapshot.ErrChecksum, snapshot.ErrTruncated, snapshot.ErrTooLarge} {
		if errors.Is(err, reason) {
			return true
		}
	}
	return false
}

// snapshotFailure gives an error of the store its code.
func snapshotFailure(err error) *failure.Error {
	var corrupt *store.CorruptError
	code := failure.Internal
	switch {
	case errors.Is(err, store.ErrNotFound):
		code = failure.SnapshotNotFound
	case errors.Is(err, store.ErrExists):
		code = failure.SnapshotExists
	case errors.Is(err, snapshot.ErrVersion):
		code = failure.SnapshotUnsupported
	case errors.As(err, &corrupt), damaged(err):
		code = failure.SnapshotCorrupt
	}
	return failure.As(code, fmt.Errorf("snapshot: %w", err))
}
