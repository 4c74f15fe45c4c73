package bench

import (
	"context"
	"errors"
	"time"

	"github.com/forkvm/forkvm/internal/node"
)

// clone measures what idle clones hold that they share with nobody.
func (b *bench) clone(ctx context.Context) error {
	name, err := b.scene.snapshot(ctx, standardMemory)
	if err != nil {
		return err
	}
	vms, err := b.idle(ctx, name, children)
	if err == nil {
		b.row("clone_private", MiB, held(vms))
	}
	return errors.Join(err, remove(ctx, vms...))
}

// idle makes so many clones of a snapshot and leaves them alone. With an error it returns those that there are.
func (b *bench) idle(ctx context.Context, snapshot string, n int) (vms []*node.VM, err error) {
	for range n {
		vm, err := b.scene.node.Restore(ctx, snapshot, node.Options{})
		if err != nil {
			return vms, err
		}
		vms = append(vms, vm)
	}
	time.Sleep(5 * settle)
	return vms, nil
}
