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
	var vms []*node.VM
	for range children {
		vm, err := b.scene.node.Restore(ctx, name, node.Options{})
		if err != nil {
			return errors.Join(err, remove(ctx, vms...))
		}
		vms = append(vms, vm)
	}
	time.Sleep(5 * settle)
	b.row("clone_private", MiB, held(vms))
	return remove(ctx, vms...)
}
