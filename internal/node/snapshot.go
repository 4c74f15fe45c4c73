package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Snapshot is what taking one yields.
type Snapshot struct {
	Manifest *snapshot.Manifest
	// Pause is how long the VM stood still.
	Pause time.Duration
}

// Snapshot freezes the VM under a name, optionally for a task. The VM goes on
// while layers are written; one that was paused stays so.
func (vm *VM) Snapshot(ctx context.Context, name, task string) (*Snapshot, error) {
	// Asked before the VM is stopped for nothing.
	if _, err := vm.node.store.Stat(name); err == nil {
		return nil, failure.New(failure.SnapshotExists, "a snapshot named %q exists: remove it first, or choose another name", name)
	}
	checkpoint, err := vm.checkpoint(ctx)
	if err != nil {
		return nil, err
	}
	defer checkpoint.Close()
	m, err := checkpoint.Store(ctx, vm.node.store, machine.Label{
		Name:    name,
		Task:    task,
		Parent:  vm.parentSnapshot(),
		Version: vm.node.config.Version,
	})
	if err != nil {
		return nil, snapshotFailure(err)
	}
	return &Snapshot{Manifest: m, Pause: checkpoint.Pause}, nil
}

// parentSnapshot is the ID of the snapshot that the VM came from, if it still
// exists.
func (vm *VM) parentSnapshot() string {
	if vm.Record.Snapshot == "" {
		return ""
	}
	m, err := vm.node.store.Stat(vm.Record.Snapshot)
	if err != nil {
		return ""
	}
	return m.ID
}

// Snapshots lists the node's snapshots by name, damaged ones too.
func (n *Node) Snapshots() ([]store.Info, error) {
	infos, err := n.store.List()
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return infos, nil
}

// SnapshotManifest returns what a snapshot says about itself.
func (n *Node) SnapshotManifest(name string) (*snapshot.Manifest, error) {
	m, err := n.store.Stat(name)
	if err != nil {
		return nil, snapshotFailure(err)
	}
	return m, nil
}

// VerifySnapshot reads all of a snapshot's data and compares it with its
// checksums.
func (n *Node) VerifySnapshot(ctx context.Context, name string) error {
	s, err := n.store.Open(name)
	if err != nil {
		return snapshotFailure(err)
	}
	defer s.Close()
	if err := s.Verify(ctx); err != nil {
		return snapshotFailure(err)
	}
	return nil
}

// RemoveSnapshot removes a snapshot. VMs and snapshots made from it go on.
func (n *Node) RemoveSnapshot(name string) error {
	if err := n.store.Remove(name); err != nil {
		return snapshotFailure(err)
	}
	return nil
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
	case errors.As(err, &corrupt):
		code = failure.SnapshotCorrupt
	}
	return failure.As(code, fmt.Errorf("snapshot: %w", err))
}
