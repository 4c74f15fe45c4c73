package bench

import (
	"context"
	"errors"
	"time"

	"github.com/forkvm/forkvm/internal/node"
)

// create measures creates from a snapshot, one at a time.
func (b *bench) create(ctx context.Context) error {
	c, err := b.creates(ctx, standardMemory, b.config.Creates, nil)
	if err != nil {
		return err
	}
	b.row("create_cold", CMS, c.ready)
	b.row("create_first_command", CMS, c.command)
	first := b.scene.first[standardMemory]
	b.row("first_create", CMS, first[:1])
	b.row("second_create", CMS, first[1:])
	b.phases = append(b.phases, c.course.breakdown("create"))
	return nil
}

// ready measures creates for which a process waits.
func (b *bench) ready(ctx context.Context) error {
	c, err := b.creates(ctx, standardMemory, b.config.Creates, b.wait(ctx, 1))
	if err != nil {
		return err
	}
	b.row("create_ready", CMS, c.ready)
	b.row("ready_first_command", CMS, c.command)
	b.phases = append(b.phases, c.course.breakdown("create, ready process waiting"))
	return nil
}

// rehearsed measures creates for which a process waits that has rehearsed the snapshot,
// and what to have one costs.
func (b *bench) rehearsed(ctx context.Context) error {
	name, err := b.scene.snapshot(ctx, standardMemory)
	if err != nil {
		return err
	}
	var took []float64
	wait := b.waitFor(ctx, node.Waiting{Count: 1, Snapshot: name})
	c, err := b.createsFrom(ctx, name, b.config.Creates, node.Options{}, func() error {
		begin := time.Now()
		err := wait()
		took = append(took, ms(time.Since(begin)-settle))
		return err
	})
	if err != nil {
		return err
	}
	b.row("create_rehearsed", CMS, c.ready)
	b.row("rehearsed_first_command", CMS, c.command)
	b.row("rehearsal", CMS, took)
	b.phases = append(b.phases, c.course.breakdown("create, process waiting that has rehearsed"))
	return b.rehearsedMemory(ctx, name)
}

// rehearsedMemory measures what processes hold that have rehearsed and wait, and what the
// VMs do that they become.
func (b *bench) rehearsedMemory(ctx context.Context, snapshot string) error {
	const processes = 4
	w := node.Waiting{Count: processes, Snapshot: snapshot}
	if err := b.waitFor(ctx, w)(); err != nil {
		return err
	}
	if err := b.waitingMemory("rehearsed_private"); err != nil {
		return err
	}
	vms, err := b.idle(ctx, snapshot, processes)
	if err == nil {
		b.row("rehearsed_clone_private", MiB, held(vms))
	}
	return errors.Join(err, remove(ctx, vms...))
}

// waitingMemory measures what each process holds that waits.
func (b *bench) waitingMemory(row string) error {
	waiting, err := b.scene.node.WaitingProcesses()
	if err != nil {
		return err
	}
	var holding []float64
	for _, r := range waiting {
		holding = append(holding, privateMiB(r.PID))
	}
	b.row(row, MiB, holding)
	return nil
}

// wait returns what has so many processes wait for VMs. They are all used before it is
// called again.
func (b *bench) wait(ctx context.Context, processes int) func() error {
	return b.waitFor(ctx, node.Waiting{Count: processes, CPUs: 1})
}

func (b *bench) waitFor(ctx context.Context, w node.Waiting) func() error {
	return func() error {
		_, err := b.scene.node.Prepare(ctx, w)
		time.Sleep(settle)
		return err
	}
}

// creates are samples of creates: milliseconds until the guest agent had
// answered and confirmed the identity, and until the first command had ended.
type creates struct {
	ready, command []float64
	course         course
}

// creates makes and removes VMs, one at a time. What prepare does before each, if
// there is any, is not counted.
func (b *bench) creates(ctx context.Context, memory uint64, n int, prepare func() error) (c creates, err error) {
	name, err := b.scene.snapshot(ctx, memory)
	if err != nil {
		return c, err
	}
	return b.createsFrom(ctx, name, n, node.Options{}, prepare)
}

// createsFrom is creates from a snapshot that is there.
func (b *bench) createsFrom(ctx context.Context, name string, n int, o node.Options, prepare func() error) (c creates, err error) {
	for range n {
		if prepare != nil {
			if err := prepare(); err != nil {
				return c, err
			}
		}
		begin := time.Now()
		vm, err := b.scene.node.Restore(ctx, name, o)
		if err != nil {
			return c, err
		}
		ready := time.Since(begin)
		err = run(ctx, vm, "true")
		command := time.Since(begin)
		if err != nil {
			return c, err
		}
		c.ready, c.command = append(c.ready, ms(ready)), append(c.command, ms(command))
		c.course.add(vm.Phases, ready)
		c.course.step("first command", ms(command-ready))
		if err := remove(ctx, vm); err != nil {
			return c, err
		}
	}
	return c, nil
}
