package bench

import (
	"context"
	"errors"
	"time"

	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/process"
)

const (
	// budgetPages is how many dirty pages the budget speaks of.
	budgetPages = 1000
	// overhead is about what the command dirties that dirties pages.
	overhead = 400
	children = 16
)

// fork measures the source's pause and how long children take.
func (b *bench) fork(ctx context.Context) error {
	pause, err := b.pauses(ctx, standardMemory, budgetPages-overhead)
	if err != nil {
		return err
	}
	b.row("fork_pause", CMS, pause.ms)
	b.row("fork_pause_pages", Pages, pause.pages)
	sixteen, err := b.forks(ctx, standardMemory, children)
	if err != nil {
		return err
	}
	b.row("fork16_child", CMS, sixteen.child)
	one, err := b.forks(ctx, standardMemory, 1)
	if err != nil {
		return err
	}
	b.row("fork1", CMS, one.child)
	b.phases = append(b.phases, one.course.breakdown("fork"))
	return nil
}

// pauses are samples of a source's pause, and of the pages that were dirty.
type pauses struct{ ms, pages []float64 }

// pauses takes checkpoints of a running VM, as a fork does, with about so many
// pages dirtied between one and the next.
func (b *bench) pauses(ctx context.Context, memory uint64, pages int) (p pauses, err error) {
	vm, err := b.scene.restore(ctx, memory)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, remove(ctx, vm)) }()
	for i := range b.config.Rounds + 1 {
		if err := dirty(ctx, vm, pages); err != nil {
			return p, err
		}
		time.Sleep(settle)
		c, err := b.scene.checkpoint(ctx, vm)
		if err != nil {
			return p, err
		}
		if i > 0 {
			p.ms = append(p.ms, ms(c.Pause))
			p.pages = append(p.pages, float64(c.Memory[len(c.Memory)-1].Stored()))
		}
		if err := c.Close(); err != nil {
			return p, err
		}
	}
	return p, nil
}

// checkpoint is a fork without children.
func (s *scene) checkpoint(ctx context.Context, vm *node.VM) (*machine.Checkpoint, error) {
	c, err := process.Dial(ctx, vm.Directory())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	tops, err := machine.NewTops(vm.Shape, s.dir)
	if err != nil {
		return nil, err
	}
	checkpoint, err := c.Checkpoint(ctx, tops)
	for _, f := range tops {
		if f != nil {
			f.Close()
		}
	}
	return checkpoint, err
}

// forks are samples of forks: the time from the call until the last child's guest
// agent has answered, divided by the number of children. On one processor that
// is the work that a child costs.
type forks struct {
	child  []float64
	course course
}

func (b *bench) forks(ctx context.Context, memory uint64, children int) (f forks, err error) {
	vm, err := b.scene.restore(ctx, memory)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, remove(ctx, vm)) }()
	for range b.config.Rounds {
		if err := dirty(ctx, vm, budgetPages-overhead); err != nil {
			return f, err
		}
		begin := time.Now()
		born, err := b.scene.node.Fork(ctx, vm, make([]node.Options, children))
		waited := time.Since(begin)
		if err != nil {
			return f, err
		}
		f.child = append(f.child, ms(waited)/float64(children))
		var vms []*node.VM
		for _, child := range born {
			if err = errors.Join(err, child.Err); child.Err == nil {
				vms = append(vms, child.VM)
			}
		}
		if err = errors.Join(err, remove(ctx, vms...)); err != nil {
			return f, err
		}
		for _, vm := range vms {
			f.course.add(vm.Phases, waited)
		}
	}
	return f, nil
}
