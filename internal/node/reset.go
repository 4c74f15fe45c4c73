package node

import (
	"context"
	"fmt"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

// ResetOptions say how a VM is put back.
type ResetOptions struct {
	// To is the snapshot that the VM goes back to, and from then on comes from.
	// Empty: what it came from.
	To string
	// ReadyTimeout is DefaultReadyTimeout if 0.
	ReadyTimeout time.Duration
}

// Reset puts the VM back to a snapshot and returns how long that took, up to the
// guest agent's confirmation. It keeps its process, id, name, hostname and machine
// id; what ran in it and its connections are gone, and vm.Identity is the new one.
// A reset that cannot be finished ends the VM.
func (vm *VM) Reset(ctx context.Context, o ResetOptions) (took time.Duration, err error) {
	if o.ReadyTimeout == 0 {
		o.ReadyTimeout = DefaultReadyTimeout
	}
	if o.To, err = vm.node.snapshotName(o.To); err != nil {
		return 0, err
	}
	// The new life is on record when the VM process says that it has begun.
	err = vm.locked(ctx, func(r *Record) (err error) {
		took, err = vm.reset(ctx, o, r)
		return err
	})
	if err == nil {
		_, err = vm.Note(journal.EventReset, journal.Reset{To: o.To, Generation: vm.Identity.Generation})
	}
	if err != nil {
		return 0, failure.As(failure.Internal, err)
	}
	return took, nil
}

// reset makes the record that of the VM's new life.
func (vm *VM) reset(ctx context.Context, o ResetOptions, r *Record) (time.Duration, error) {
	c, err := vm.dial(ctx)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	config := process.ResetConfig{Identity: r.Identity.Next(), ReadyTimeout: o.ReadyTimeout}
	switch {
	case o.To != "":
		target, manifest, err := machine.FromStore(ctx, vm.node.store, o.To, false)
		if err != nil {
			return 0, snapshotFailure(err)
		}
		defer target.Close()
		config.To, r.Snapshot, r.Origin = target, o.To, standingOn(manifest)
	case r.Snapshot == "" && r.Parent == "":
		return 0, failure.New(failure.InvalidArgument,
			"vm %s was booted from an image and has no snapshot to go back to: take one with 'forkvm snapshot %[1]s NAME', and reset it with --to NAME", r.Name)
	}
	now := r.Identity.Generation
	r.Standing, r.Identity = r.Origin, config.Identity
	if err := r.Life.announce(vm.dir, now); err != nil {
		return 0, fmt.Errorf("reset vm (%s): %w", r.Name, err)
	}
	if config.Tops, err = machine.NewTops(r.Shape, vm.node.tmpDir()); err != nil {
		return 0, err
	}
	defer linux.CloseFiles(config.Tops...)
	var took time.Duration
	err = vm.duringReset(r, func() (err error) {
		took, err = c.Reset(ctx, config)
		return err
	})
	return took, err
}
