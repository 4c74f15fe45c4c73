package judge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/task"
)

// TrialSchema is the version of Trial's JSON form.
const TrialSchema = "forkvm/task-trial/v1"

// Trial is whether a task can be trusted with training.
type Trial struct {
	Schema string `json:"schema"`
	Task   string `json:"task"`
	Step   string `json:"step,omitempty"`
	// Accepted: there are no Problems.
	Accepted bool     `json:"accepted"`
	Problems []string `json:"problems"`
	// Solution is of rollouts in which the task's own solution has run, Empty of
	// rollouts in which nothing has.
	Solution Trials `json:"solution"`
	Empty    Trials `json:"empty"`
}

// Trials are verdicts of one kind.
type Trials struct {
	Agreement
	Verdicts []*Verdict `json:"verdicts"`
}

// Solution is a task's own.
type Solution struct {
	// Dir is a directory of the host with solve.sh.
	Dir string
	Env []string
	// User runs it, in WorkDir.
	User, WorkDir string
	// Timeout is by the guest's clock; 0: DefaultTimeout.
	Timeout time.Duration
}

// Solutions is how a task, or a step of it, solves itself.
func Solutions(t *task.Task, step string, lookup func(string) (string, bool)) (Solution, error) {
	dir, err := t.Solution(step)
	if err != nil {
		return Solution{}, err
	}
	if _, err := os.Stat(dir + "/" + task.SolutionProgram); err != nil {
		return Solution{}, fmt.Errorf("task %s has no solution to try: %w", t.Name, err)
	}
	s := Solution{Dir: dir, User: t.Agent.User, WorkDir: t.Environment.WorkDir, Timeout: t.Agent.Timeout}
	s.Env, err = Environ(t.SolutionEnv, lookup)
	return s, err
}

// Subject is a rollout that is made to try a task.
type Subject interface {
	Guest() Guest
	Judge(ctx context.Context, r Request) (*Verdict, error)
	Close() error
}

// Try judges count rollouts in which the task's own solution has run, and as many in
// which nothing has.
func Try(ctx context.Context, start func(context.Context) (Subject, error), r Request, s Solution, count int) (*Trial, error) {
	t := &Trial{Schema: TrialSchema, Task: r.Task, Step: r.Step, Problems: []string{}}
	for _, kind := range []struct {
		trials *Trials
		solve  func(context.Context, Guest) error
	}{{&t.Empty, nil}, {&t.Solution, s.run}} {
		verdicts, err := Repeat(ctx, count, nil, func(ctx context.Context, _ func(*Verdict)) (*Verdict, error) {
			return tryOnce(ctx, start, r, kind.solve)
		})
		if err != nil {
			return nil, err
		}
		kind.trials.Verdicts, kind.trials.Agreement = verdicts, Agree(verdicts)
	}
	t.judge()
	return t, nil
}

func tryOnce(ctx context.Context, start func(context.Context) (Subject, error), r Request, solve func(context.Context, Guest) error) (v *Verdict, err error) {
	subject, err := start(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, subject.Close()) }()
	if solve != nil {
		if err := solve(ctx, subject.Guest()); err != nil {
			return nil, err
		}
	}
	return subject.Judge(ctx, r)
}

// solutionDir is where the solution is while it runs.
const solutionDir = "/solution"

// run solves the task in a guest and takes the solution away again.
func (s Solution) run(ctx context.Context, g Guest) error {
	if _, err := putTests(ctx, g, s.Dir, client.Placement{Dir: solutionDir}); err != nil {
		return fmt.Errorf("copy solution: %w", err)
	}
	program, err := programArgv(s.Dir, task.SolutionProgram, solutionDir)
	if err != nil {
		return fmt.Errorf("read solution: %w", err)
	}
	var output bytes.Buffer
	c := client.Command{
		Args: program, Env: s.Env, User: s.User, Dir: s.WorkDir, Timeout: s.Timeout, Stdout: &output, Stderr: &output, StdoutLimit: 1 << 20,
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	result, err := g.Exec(ctx, c)
	if err != nil {
		return fmt.Errorf("run solution: %w", err)
	}
	if result.ExitCode != 0 {
		return fmt.Errorf("run solution: exit code %d: %s", result.ExitCode, lastLine(output.String()))
	}
	return g.Remove(ctx, solutionDir, true)
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// putTests copies a directory of the host.
func putTests(ctx context.Context, g Guest, from string, to client.Placement) (client.TreeStats, error) {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := packTests(from, w)
		w.CloseWithError(err)
		packed <- err
	}()
	stats, err := g.PlaceTree(ctx, to, r)
	r.CloseWithError(io.ErrClosedPipe)
	if packErr := <-packed; packErr != nil && !errors.Is(packErr, io.ErrClosedPipe) {
		return stats, &hostError{packErr}
	}
	return stats, err
}

// hostError is of a file of the host.
type hostError struct{ err error }

func (e *hostError) Error() string { return e.err.Error() }
func (e *hostError) Unwrap() error { return e.err }

// judge finds what speaks against the task.
func (t *Trial) judge() {
	problem := func(format string, a ...any) { t.Problems = append(t.Problems, fmt.Sprintf(format, a...)) }
	for _, kind := range []struct {
		name   string
		trials Trials
	}{{"the solution", t.Solution}, {"the empty solution", t.Empty}} {
		switch a := kind.trials.Agreement; {
		case !a.Agreed:
			problem("%s has verdicts that vary: %v, rewards %v", kind.name, a.Outcomes, a.Rewards)
		case a.Outcomes[Scored] == 0:
			problem("%s has no number: %s: %s", kind.name, kind.trials.Verdicts[0].Summary(), kind.trials.Verdicts[0].Detail)
		}
	}
	if s, e := t.Solution.Mean, t.Empty.Mean; s != nil && e != nil {
		switch {
		case *s <= *e:
			problem("the solution has %v, which is not more than the %v of the empty one", *s, *e)
		case *e >= 1:
			problem("the empty solution passes with %v", *e)
		}
	}
	t.Accepted = len(t.Problems) == 0
}
