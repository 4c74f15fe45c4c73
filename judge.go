package forkvm

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/task"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Verdict is what judging a machine came to, with its evidence. Only one outcome,
// Scored, has a Reward.
type Verdict = judge.Verdict

// Outcome is the kind of a verdict.
type Outcome = judge.Outcome

// Outcomes.
const (
	Scored          = judge.Scored
	PolicyTimeout   = judge.PolicyTimeout
	VerifierTimeout = judge.VerifierTimeout
	VerifierError   = judge.VerifierError
	NoVerdict       = judge.NoVerdict
	OOM             = judge.OOM
	InfraError      = judge.InfraError
	Tampering       = judge.Tampering
	Disagreement    = judge.Disagreement
)

// Verifier is how a machine is judged; TaskVerifier and ParseVerifier make one.
type Verifier = judge.Verifier

// Judging says what is judged, and how.
type Judging = judge.Request

// Baselines remember what snapshots are like, for Judging.Baselines: who judges many
// rollouts of a task looks at its snapshot once.
type Baselines = judge.Baselines

// TaskVerifier is how a task (package guest/task), or one of its steps, is judged.
// lookup finds variables of the host's environment that the task refers to, such as
// os.LookupEnv.
func TaskVerifier(t *task.Task, step string, lookup func(name string) (string, bool)) (Verifier, error) {
	return judge.FromTask(t, step, lookup)
}

// ParseVerifier makes a verifier of a directory with test.sh, or of "sh:" and a
// command for the guest's shell, whose exit code is the verdict.
func ParseVerifier(spec string) (Verifier, error) { return judge.ParseSpec(spec) }

// Judge gives a verdict on what was done in the machine, in copies of it: a fork, and
// a machine from the task's snapshot to which what the verifier declares is copied. The
// machine goes on and nothing in it changes.
//
// The error is for requests that make no sense and for a ctx that has ended. Everything
// else, also that no machine could be made, is an outcome of the verdict.
func (vm *VM) Judge(ctx context.Context, st *store.Store, snapshot string, j Judging) (*Verdict, error) {
	manifest, err := st.Stat(snapshot)
	if err != nil {
		return nil, err
	}
	vm.standing.Lock()
	lineage := vm.lineage
	vm.standing.Unlock()
	j.Rollout = judge.Rollout{
		ID: vm.identity.MachineID, Name: vm.identity.Hostname, Generation: vm.machine.Generation(),
		Snapshot: snapshot, SnapshotID: manifest.ID, Lineage: lineage,
	}
	return judge.Judge(ctx, &judgeMachines{vm, st, manifest}, j)
}

// Agreement says how far several verdicts on the same machine agree.
type Agreement = judge.Agreement

// Agree compares verdicts.
func Agree(verdicts []*Verdict) Agreement { return judge.Agree(verdicts) }

// judgeMachines are copies of a machine and of its task's snapshot.
type judgeMachines struct {
	vm       *VM
	store    *store.Store
	snapshot *snapshot.Manifest
}

// config is of a machine whose storage errors are remembered.
func (m *judgeMachines) config(storage *atomic.Pointer[error]) Config {
	return Config{
		Name: "judge", TempDir: m.vm.tempDir, FrozenTime: m.vm.identity.Time == machine.TimeFrozen,
		OnDiskError: func(_ string, err error) { storage.Store(&err) },
		Network:     m.vm.network,
	}
}

// Fork implements judge.Machines.
func (m *judgeMachines) Fork(ctx context.Context) (judge.Machine, error) {
	var storage atomic.Pointer[error]
	children, err := m.vm.fork(ctx, m, m.config(&storage))
	if err != nil {
		return nil, judge.NotReady(err)
	}
	return newJudgeMachine(children[0], &storage), nil
}

// Clean implements judge.Machines.
func (m *judgeMachines) Clean(ctx context.Context) (judge.Machine, error) {
	var storage atomic.Pointer[error]
	vm, err := restore(ctx, m.store, m.snapshot.Name, m, m.config(&storage))
	if err != nil {
		return nil, err
	}
	return newJudgeMachine(vm, &storage), nil
}

// useJudgingSet has a fork of a machine that stands on these snapshots make ready what
// machines use in which is judged.
func (m *judgeMachines) useJudgingSet(c *machine.Checkpoint, lineage []string) {
	if slices.Contains(lineage, m.snapshot.ID) {
		c.UseJudgingSet(m.store, m.snapshot, false)
	}
}

// judgeMachine is a machine in which is judged.
type judgeMachine struct {
	*VM
	storage *atomic.Pointer[error]
	guest   *client.Client // keeps its connection
}

func newJudgeMachine(vm *VM, storage *atomic.Pointer[error]) judgeMachine {
	return judgeMachine{vm, storage, vm.Agent().Keeping()}
}

func (m judgeMachine) ID() string         { return m.identity.MachineID }
func (m judgeMachine) Guest() judge.Guest { return m.guest }

// Close implements judge.Machine.
func (m judgeMachine) Close() error { return errors.Join(m.guest.Close(), m.VM.Close()) }

// NoteUse implements judge.Machine.
func (m judgeMachine) NoteUse() { m.machine.NoteUse() }

// Health implements judge.Machine.
func (m judgeMachine) Health(context.Context) judge.Health {
	if exit := m.Exit(); exit != nil {
		return judge.EndOf(exit)
	}
	if err := m.storage.Load(); err != nil {
		return judge.Health{Storage: *err}
	}
	return judge.Health{}
}
