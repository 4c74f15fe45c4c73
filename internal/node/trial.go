package node

import (
	"context"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/judge"
)

// Trial says how a task is tried.
type Trial struct {
	judge.Request
	Solution judge.Solution
	// Snapshot is the task's.
	Snapshot string
	// Count is how many rollouts of each kind are judged.
	Count int
}

// TryTask judges rollouts of a task in which its own solution has run, and others in
// which nothing has. Nothing of them stays.
func (n *Node) TryTask(ctx context.Context, t Trial) (*judge.Trial, error) {
	if _, err := n.store.Stat(t.Snapshot); err != nil {
		return nil, snapshotFailure(err)
	}
	start := func(ctx context.Context) (judge.Subject, error) {
		vm, err := n.Restore(ctx, t.Snapshot, Options{Name: judgePrefix + newID(), Attached: true, Passing: true, Recording: RecordNone})
		if err != nil {
			return nil, err
		}
		return subject{judgeMachine{vm, vm.Agent()}}, nil
	}
	trial, err := judge.Try(ctx, start, t.Request, t.Solution, t.Count)
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return trial, nil
}

// subject is a VM that was made to try a task.
type subject struct{ judgeMachine }

// Judge implements judge.Subject.
func (s subject) Judge(ctx context.Context, r judge.Request) (*judge.Verdict, error) {
	return s.vm.Judge(ctx, Judging{Request: r})
}
