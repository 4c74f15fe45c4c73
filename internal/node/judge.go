package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/snapshot"
)

// Judging says how a VM is judged.
type Judging struct {
	judge.Request
	// Snapshot is the task's, from which clean VMs are made; empty: what the VM
	// came from.
	Snapshot string
}

// Judge gives a verdict on the VM as it is now, which is on record before Decided hears
// of it. The VM goes on. VMs in which is judged end with the calling process.
func (vm *VM) Judge(ctx context.Context, r Judging) (*judge.Verdict, error) {
	if r.Snapshot == "" {
		r.Snapshot = vm.Record.Snapshot
	}
	if r.Snapshot == "" {
		return nil, failure.New(failure.InvalidArgument,
			"vm %s was booted from an image: name the task's snapshot with --snapshot", vm.Name)
	}
	info, err := vm.node.store.Stat(r.Snapshot)
	if err != nil {
		return nil, snapshotFailure(err)
	}
	r.Rollout = judge.Rollout{
		ID: vm.ID, Name: vm.Name, Generation: vm.Identity.Generation, Snapshot: r.Snapshot, SnapshotID: info.ID, Lineage: vm.Lineage,
	}
	r.Baselines = &vm.node.baselines
	begun, err := vm.Note(journal.EventJudging, journal.Judging{Task: r.Task, Step: r.Step, Mode: string(r.Where)})
	if err != nil {
		return nil, err
	}
	var unnoted error
	decided := r.Decided
	r.Decided = func(v *judge.Verdict) {
		if unnoted = vm.noteVerdict(begun.Seq, v); unnoted == nil && decided != nil {
			decided(v)
		}
	}
	v, err := judge.Judge(ctx, &judgeMachines{vm, info}, r.Request)
	if err != nil {
		return nil, failure.As(failure.InvalidArgument, err)
	}
	if unnoted != nil {
		return nil, unnoted
	}
	return v, nil
}

// noteVerdict puts a verdict on record, on the judging that began in a line.
func (vm *VM) noteVerdict(of uint64, v *judge.Verdict) error {
	evidence, err := json.Marshal(v)
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("record verdict on vm (%s): %w", vm.Name, err))
	}
	_, err = vm.Note(journal.EventVerdict, journal.Verdict{Of: of, Task: v.Task, Outcome: string(v.Outcome), Reward: v.Reward, Evidence: evidence})
	return err
}

// judgePrefix begins the names of VMs in which is judged.
const judgePrefix = "judge-"

// judgeMachines are copies of a VM and of its task's snapshot.
type judgeMachines struct {
	vm       *VM
	snapshot *snapshot.Manifest
}

func (m *judgeMachines) options() Options {
	return Options{
		Name: judgePrefix + newID(), Time: m.vm.Identity.Time, Attached: true, Passing: true, Recording: RecordNone, judges: m.snapshot,
	}
}

// Fork implements judge.Machines.
func (m *judgeMachines) Fork(ctx context.Context) (judge.Machine, error) {
	children, err := m.vm.node.Fork(ctx, m.vm, []Options{m.options()})
	if err != nil {
		return nil, err
	}
	if children[0].Err != nil {
		return nil, judge.NotReady(children[0].Err)
	}
	return newJudgeMachine(children[0].VM), nil
}

// Clean implements judge.Machines.
func (m *judgeMachines) Clean(ctx context.Context) (judge.Machine, error) {
	vm, err := m.vm.node.Restore(ctx, m.snapshot.Name, m.options())
	if err != nil {
		return nil, err
	}
	return newJudgeMachine(vm), nil
}

// judgeMachine is a VM in which is judged.
type judgeMachine struct {
	vm    *VM
	guest *client.Client // keeps its connection
}

func newJudgeMachine(vm *VM) judgeMachine { return judgeMachine{vm, vm.Agent().Keeping()} }

func (m judgeMachine) ID() string         { return m.vm.ID }
func (m judgeMachine) Guest() judge.Guest { return m.guest }

// Health implements judge.Machine.
func (m judgeMachine) Health(ctx context.Context) judge.Health {
	st, err := m.vm.state(ctx)
	switch {
	case err != nil:
		return judge.Health{Ended: fmt.Sprintf("its process does not answer: %v", err)}
	case st.Exit != nil:
		return judge.EndOf(st.Exit)
	case st.State == Dead:
		return judge.Health{Ended: "its process died without a report"}
	case st.DiskError != nil:
		return judge.Health{Storage: st.DiskError}
	}
	return judge.Health{}
}

// NoteUse implements judge.Machine.
func (m judgeMachine) NoteUse() { _ = m.vm.call(context.Background(), (*process.Client).NoteUse) }

// Close implements judge.Machine.
func (m judgeMachine) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return errors.Join(m.guest.Close(), m.vm.discard(ctx))
}
