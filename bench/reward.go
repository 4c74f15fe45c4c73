package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/forkvm/forkvm/guest/task"
	judging "github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/node"
)

// verdict is a trivial verifier.
const verdict = "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n"

// reward measures how long judging takes in both ways side by side, beyond what the
// verifier takes itself: with two processes ready to become the machines, with two that
// have rehearsed the snapshot, and from nothing.
func (b *bench) reward(ctx context.Context) (err error) {
	verifier, err := b.trivialVerifier()
	if err != nil {
		return err
	}
	vm, err := b.scene.restore(ctx, standardMemory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove(ctx, vm)) }()
	cold, err := b.judgements(ctx, vm, verifier, nil)
	if err != nil {
		return err
	}
	ready, err := b.judgements(ctx, vm, verifier, b.wait(ctx, 2))
	if err != nil {
		return err
	}
	rehearsed, err := b.judgements(ctx, vm, verifier, b.waitFor(ctx, node.Waiting{Count: 2, Snapshot: vm.Record.Snapshot}))
	if err != nil {
		return err
	}
	if err := b.rewardMemory(ctx, vm.Record.Snapshot); err != nil {
		return err
	}
	b.row("reward_both", CMS, ready.beyond)
	b.row("reward_cold", CMS, cold.beyond)
	b.row("reward_rehearsed", CMS, rehearsed.beyond)
	b.row("reward_rehearsed_machines", CMS, rehearsed.phases["machines"])
	for _, name := range []string{"machines", "survey", "quiesce", "transplant", "verify"} {
		b.row("reward_"+name, CMS, ready.phases[name])
	}
	b.row("reward_first_survey", CMS, cold.phases["survey"][:1])
	b.row("reward_close", CMS, ready.closing)
	return nil
}

// rewardMemory measures what a process holds that has rehearsed a snapshot with which was
// judged, and waits.
func (b *bench) rewardMemory(ctx context.Context, snapshot string) error {
	w := node.Waiting{Count: 2, Snapshot: snapshot}
	if err := b.waitFor(ctx, w)(); err != nil {
		return err
	}
	err := b.waitingMemory("reward_rehearsed_private")
	w.Count = 0
	return errors.Join(err, b.waitFor(ctx, w)())
}

func (b *bench) trivialVerifier() (judging.Verifier, error) {
	dir := filepath.Join(b.scene.dir, "tests")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return judging.Verifier{}, err
	}
	if err := os.WriteFile(filepath.Join(dir, task.TestProgram), []byte(verdict), 0o755); err != nil {
		return judging.Verifier{}, err
	}
	verifier, err := judging.ParseSpec(dir)
	verifier.Artifacts = []task.Artifact{{Source: "/root"}}
	return verifier, err
}

// judgements are samples: milliseconds until the verdict, without the verifiers, and
// from there until the machines are gone.
type judgements struct {
	beyond, closing []float64
	phases          map[string][]float64
}

// judgements judges a VM, once in each round. What prepare does before, if there is any,
// is not counted.
func (b *bench) judgements(ctx context.Context, vm *node.VM, verifier judging.Verifier, prepare func() error) (j judgements, err error) {
	j.phases = map[string][]float64{}
	for range b.config.Rounds {
		if prepare != nil {
			if err := prepare(); err != nil {
				return j, err
			}
		}
		begun := linux.Monotonic()
		var took float64
		r := judging.Request{Verifier: verifier, Decided: func(*judging.Verdict) { took = ms(linux.Monotonic() - begun) }}
		v, err := vm.Judge(ctx, node.Judging{Request: r})
		if err != nil {
			return j, err
		}
		if v.Outcome != judging.Scored {
			return j, fmt.Errorf("reward: %s: %s", v.Summary(), v.Detail)
		}
		j.closing = append(j.closing, ms(linux.Monotonic()-begun)-took)
		// The two verifiers run at the same time, on one processor: each takes as long as both.
		j.beyond = append(j.beyond, took-float64(max(v.Fork.Run.DurationMS, v.Transplant.Run.DurationMS)))
		for _, p := range v.Phases {
			j.phases[p.Name] = append(j.phases[p.Name], p.MS)
		}
	}
	return j, nil
}
