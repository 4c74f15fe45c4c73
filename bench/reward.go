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
// verifier takes itself.
func (b *bench) reward(ctx context.Context) error {
	vm, err := b.scene.restore(ctx, standardMemory)
	if err != nil {
		return err
	}
	dir := filepath.Join(b.scene.dir, "tests")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, task.TestProgram), []byte(verdict), 0o755); err != nil {
		return err
	}
	verifier, err := judging.ParseSpec(dir)
	if err != nil {
		return err
	}
	verifier.Artifacts = []task.Artifact{{Source: "/root"}}
	var beyond, closing []float64
	phases := map[string][]float64{}
	for range b.config.Rounds {
		begun := linux.Monotonic()
		var took float64
		r := judging.Request{Verifier: verifier, Decided: func(*judging.Verdict) { took = ms(linux.Monotonic() - begun) }}
		v, err := vm.Judge(ctx, node.Judging{Request: r})
		if err != nil {
			return err
		}
		closing = append(closing, ms(linux.Monotonic()-begun)-took)
		if v.Outcome != judging.Scored {
			return errors.Join(fmt.Errorf("reward: %s: %s", v.Summary(), v.Detail), remove(ctx, vm))
		}
		// The two verifiers run on one processor.
		beyond = append(beyond, took-float64(v.Fork.Run.DurationMS+v.Transplant.Run.DurationMS))
		for _, p := range v.Phases {
			phases[p.Name] = append(phases[p.Name], p.MS)
		}
	}
	b.row("reward_both", CMS, beyond)
	for _, name := range []string{"machines", "survey", "quiesce", "transplant", "verify"} {
		b.row("reward_"+name, CMS, phases[name])
	}
	b.row("reward_close", CMS, closing)
	return remove(ctx, vm)
}
