package bench

import (
	"context"
	"time"

	"github.com/forkvm/forkvm/internal/node"
)

// reset measures putting a VM back to the snapshot that it came from.
func (b *bench) reset(ctx context.Context) error {
	samples, err := b.resets(ctx, standardMemory, budgetPages, max(b.config.Creates/4, b.config.Rounds))
	if err != nil {
		return err
	}
	b.row("reset", CMS, samples)
	return nil
}

func (b *bench) resets(ctx context.Context, memory uint64, pages, rounds int) (samples []float64, err error) {
	err = b.rounds(ctx, memory, pages, rounds, func(vm *node.VM, i int) error {
		begin := time.Now()
		if _, err := vm.Reset(ctx, node.ResetOptions{}); err != nil {
			return err
		}
		if i > 0 {
			samples = append(samples, ms(time.Since(begin)))
		}
		return nil
	})
	return samples, err
}
