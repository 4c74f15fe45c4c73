package bench

import (
	"context"
	"errors"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/process"
)

const (
	// budgetPages is how many dirty pages the budget speaks of.
	budgetPages = 1000
	// children is how many the budget's fork has.
	children = 16
)

// fork measures the source's pause and how long children take.
func (b *bench) fork(ctx context.Context) error {
	pause, err := b.forkPauses(ctx, standardMemory, budgetPages, b.config.Rounds)
	if err != nil {
		return err
	}
	b.row("fork_pause", CMS, pause.ms)
	b.row("fork_pause_pages", Pages, pause.pages)
	if err := b.forkSixteen(ctx); err != nil {
		return err
	}
	one, err := b.forks(ctx, standardMemory, 1, b.config.Rounds, nil)
	if err != nil {
		return err
	}
	b.row("fork1", CMS, one.child)
	b.phases = append(b.phases, one.course.breakdown("fork"))
	return nil
}

// forkSixteen measures forks of 16, with a ready process waiting for each child and
// with none.
func (b *bench) forkSixteen(ctx context.Context) error {
	err := b.forkInto(ctx, "fork16_child_cold", "child of a fork of 16", nil)
	if err != nil {
		return err
	}
	return b.forkInto(ctx, "fork16_child", "child of a fork of 16, ready process waiting", b.wait(ctx, children))
}

// forkRehearsed measures them with processes waiting that have rehearsed the snapshot
// from which the forked VM comes.
func (b *bench) forkRehearsed(ctx context.Context) error {
	name, err := b.scene.snapshot(ctx, standardMemory)
	if err != nil {
		return err
	}
	wait := b.waitFor(ctx, node.Waiting{Count: children, Snapshot: name})
	if err := b.forkInto(ctx, "fork16_child_rehearsed", "child of a fork of 16, process waiting that has rehearsed", wait); err != nil {
		return err
	}
	one, err := b.forks(ctx, standardMemory, 1, b.config.Rounds, b.waitFor(ctx, node.Waiting{Count: 1, Snapshot: name}))
	if err != nil {
		return err
	}
	b.row("fork1_rehearsed", CMS, one.child)
	b.phases = append(b.phases, one.course.breakdown("fork, process waiting that has rehearsed"))
	return nil
}

func (b *bench) forkInto(ctx context.Context, row, phases string, prepare func() error) error {
	f, err := b.forks(ctx, standardMemory, children, b.config.Rounds, prepare)
	if err != nil {
		return err
	}
	b.row(row, CMS, f.child)
	b.phases = append(b.phases, f.executed.breakdown(phases+", by who executes", children*len(f.child)))
	return nil
}

// step measures the pause of a VM that takes snapshot after snapshot.
func (b *bench) step(ctx context.Context) error {
	pause, err := b.stepPauses(ctx, standardMemory, budgetPages, b.config.Rounds)
	if err != nil {
		return err
	}
	b.row("step_pause", CMS, pause.ms)
	return nil
}

// pauses are samples of how long a VM stood still, and of the pages that were
// dirty then, as far as they are known.
type pauses struct{ ms, pages []float64 }

// forkPauses are those of a fork, without the children that do not matter for
// them.
func (b *bench) forkPauses(ctx context.Context, memory uint64, pages, rounds int) (p pauses, err error) {
	err = b.rounds(ctx, memory, pages, rounds, func(vm *node.VM, i int) error {
		c, err := b.scene.checkpoint(ctx, vm)
		if err != nil {
			return err
		}
		if i > 0 {
			p.ms = append(p.ms, ms(c.Pause))
			p.pages = append(p.pages, float64(c.Memory[len(c.Memory)-1].Stored()))
		}
		return c.Close()
	})
	return p, err
}

func (b *bench) stepPauses(ctx context.Context, memory uint64, pages, rounds int) (p pauses, err error) {
	err = b.rounds(ctx, memory, pages, rounds, func(vm *node.VM, i int) error {
		s, err := vm.Snapshot(ctx, "", "")
		if err != nil {
			return err
		}
		if i > 0 {
			p.ms = append(p.ms, ms(s.Pause))
		}
		return nil
	})
	return p, err
}

// rounds calls measure again and again on one VM that has dirtied about so many
// pages since the last time. Round 0 is for warming up.
func (b *bench) rounds(ctx context.Context, memory uint64, pages, rounds int, measure func(vm *node.VM, round int) error) (err error) {
	vm, err := b.scene.restore(ctx, memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(ctx, vm)) }()
	for i := range rounds + 1 {
		if err := dirty(ctx, vm, pages); err != nil {
			return err
		}
		time.Sleep(settle)
		if err := measure(vm, i); err != nil {
			return err
		}
	}
	return nil
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
	return checkpoint, errors.Join(err, linux.CloseFiles(tops...))
}

// forks are samples of forks: the time from the call until the last child's guest
// agent has answered, divided by the number of children. On one processor that
// is the work that a child costs. What prepare does before each, if there is any, is
// not counted.
type forks struct {
	child    []float64
	course   course
	executed executed // for all children
}

func (b *bench) forks(ctx context.Context, memory uint64, children, rounds int, prepare func() error) (f forks, err error) {
	err = b.rounds(ctx, memory, budgetPages, rounds, func(vm *node.VM, i int) error {
		if prepare != nil {
			if err := prepare(); err != nil {
				return err
			}
		}
		var born []node.Child
		waited, executed, err := watch(func() (err error) {
			born, err = b.scene.node.Fork(ctx, vm, make([]node.Options, children))
			return err
		})
		if err != nil {
			return err
		}
		var vms []*node.VM
		for _, child := range born {
			if err = errors.Join(err, child.Err); child.Err == nil {
				vms = append(vms, child.VM)
			}
		}
		if err = errors.Join(err, remove(ctx, vms...)); err != nil || i == 0 {
			return err
		}
		f.executed = f.executed.plus(executed)
		f.child = append(f.child, ms(waited)/float64(children))
		for _, vm := range vms {
			f.course.add(vm.Phases, waited)
		}
		return nil
	})
	return f, err
}
