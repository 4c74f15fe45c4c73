package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/guest/task"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/node"
)

// verifierFlags say how is judged.
type verifierFlags struct {
	task, step, spec string
	where            task.Where
	retries          int

	// What a task says itself.
	score     task.Score
	junit     string
	timeout   time.Duration
	user, dir string
	workTree  string
	artifacts []string
}

func (v *verifierFlags) add(f *pflag.FlagSet) {
	f.StringVar(&v.step, "step", "", "step of a task that has several")
	f.Var(choice[task.Where]{&v.where, []task.Where{task.Both, task.Fork, task.Transplant}}, "mode", "where is judged, instead of what the task says")
	f.IntVar(&v.retries, "retries", judge.DefaultRetries, "how often judging is tried again when the machine has failed")
}

// addSpec adds the flags for judging without a task.
func (v *verifierFlags) addSpec(f *pflag.FlagSet) {
	v.score = task.ScoreReward
	f.StringVar(&v.task, "task", "", "directory of the task")
	f.StringVar(&v.spec, "verifier", "", "judge without a task: a directory with test.sh, or sh:COMMAND")
	f.Var(choice[task.Score]{&v.score, []task.Score{task.ScoreReward, task.ScoreExitCode, task.ScoreJUnit}}, "score", "with --verifier: what the verdict is")
	f.StringVar(&v.junit, "junit", "", "with --verifier: path of the JUnit report in the guest")
	f.DurationVar(&v.timeout, "timeout", judge.DefaultTimeout, "with --verifier: how long the verifier may run")
	f.StringVarP(&v.user, "user", "u", "", "with --verifier: who runs it")
	f.StringVarP(&v.dir, "workdir", "w", "", "with --verifier: its working directory")
	f.StringVar(&v.workTree, "work-tree", "", "with --verifier: git work tree that is transplanted")
	f.StringArrayVar(&v.artifacts, "artifact", nil, "with --verifier: path, or pattern of paths, that is transplanted; may be repeated")
}

// specFlags belong to --verifier.
var specFlags = []string{"score", "junit", "timeout", "user", "workdir", "work-tree", "artifact"}

// request is what the flags ask for.
func (v *verifierFlags) request(a *app, f *pflag.FlagSet) (judge.Request, error) {
	if v.spec == "" {
		t, err := a.openTask(v.task)
		if err != nil {
			return judge.Request{}, err
		}
		return v.fromTask(a, t)
	}
	verifier, err := v.fromSpec(f)
	return v.with(judge.Request{Verifier: verifier}), err
}

// fromTask judges as a task says that was read from v.task.
func (v *verifierFlags) fromTask(a *app, t *task.Task) (judge.Request, error) {
	verifier, err := judge.FromTask(t, v.step, a.lookup)
	if err != nil {
		return judge.Request{}, usagef("--task %s: %w", v.task, err)
	}
	return v.with(judge.Request{Task: t.Name, Step: v.step, Verifier: verifier}), nil
}

// with adds what flags say whatever the verifier.
func (v *verifierFlags) with(r judge.Request) judge.Request {
	if r.Retries = v.retries; v.retries == 0 {
		r.Retries = -1
	}
	if v.where != "" {
		r.Where = v.where
	}
	return r
}

// openTask reads a task directory and says what may be wrong with it.
func (a *app) openTask(dir string) (*task.Task, error) {
	t, err := task.Open(dir)
	if err != nil {
		return nil, &usageError{err}
	}
	for _, w := range t.Warnings {
		fmt.Fprintf(a.Stderr, "forkvm: warning: %s\n", output.Visible(w))
	}
	return t, nil
}

func (a *app) lookup(name string) (string, bool) {
	value := a.User.Getenv(name)
	return value, value != ""
}

func (v *verifierFlags) fromSpec(f *pflag.FlagSet) (judge.Verifier, error) {
	verifier, err := judge.ParseSpec(v.spec)
	if err != nil {
		return verifier, usagef("--%w", err)
	}
	if f.Changed("score") {
		verifier.Score = v.score
	}
	if v.junit != "" {
		verifier.Score, verifier.JUnit = task.ScoreJUnit, v.junit
	}
	verifier.Timeout, verifier.User, verifier.Dir, verifier.WorkTree = v.timeout, v.user, v.dir, v.workTree
	for _, path := range v.artifacts {
		verifier.Artifacts = append(verifier.Artifacts, task.Artifact{Source: path})
	}
	if err := verifier.Check(); err != nil {
		return verifier, &usageError{err}
	}
	return verifier, nil
}

// check finds flags that do not go together.
func (v *verifierFlags) check(f *pflag.FlagSet) error {
	if (v.task == "") == (v.spec == "") {
		return usagef("one of --task and --verifier is needed")
	}
	if v.spec != "" && v.step != "" {
		return usagef("--step belongs to --task")
	}
	for _, name := range specFlags {
		if v.task != "" && f.Changed(name) {
			return usagef("--%s belongs to --verifier; with --task the task says it", name)
		}
	}
	return nil
}

// maxRepeat bounds --repeat and the count of task verify.
const maxRepeat = 100

func (a *app) rewardVerb() *cobra.Command {
	var flags verifierFlags
	var snapshot string
	var repeat int
	var timedOut bool
	cmd := &cobra.Command{
		Use:   "reward [flags] VM --task DIR",
		Short: "Judge what a policy has done in a VM",
		Example: "  forkvm reward vm-1 --task tasks/sums\n  forkvm reward -o json --repeat 5 vm-1 --task tasks/sums\n" +
			"  forkvm reward vm-1 --verifier 'sh:make -C /srv/project check' --work-tree /srv/project",
		Args: needs("VM"),
	}
	f := cmd.Flags()
	flags.add(f)
	flags.addSpec(f)
	f.StringVar(&snapshot, "snapshot", "", "the task's snapshot, if the VM did not come from it")
	f.IntVar(&repeat, "repeat", 1, fmt.Sprintf("judge so often, at the same time, and compare; 1 to %d", maxRepeat))
	f.BoolVar(&timedOut, "policy-timed-out", false, "the policy ran out of its time: nothing is judged")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if err := flags.check(f); err != nil {
			return err
		}
		if repeat < 1 || repeat > maxRepeat {
			return usagef("--repeat %d: 1 to %d are possible", repeat, maxRepeat)
		}
		r, err := flags.request(a, f)
		if err != nil {
			return err
		}
		r.PolicyTimedOut = timedOut
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		// Who reads the verdicts need not wait until the machines in which was judged are gone.
		var shown error
		show := func(all []*judge.Verdict) { shown = a.showVerdicts(all, repeat > 1) }
		_, err = judge.Repeat(ctx, repeat, show, func(ctx context.Context, decided func(*judge.Verdict)) (*judge.Verdict, error) {
			r := r
			r.Decided = decided
			return vm.Judge(ctx, node.Judging{Request: r, Snapshot: snapshot})
		})
		if err != nil {
			return err
		}
		return shown
	})
	return a.withOutput(cmd)
}

// verdictsView is the document of several verdicts.
type verdictsView struct {
	Schema    string           `json:"schema"`
	Agreement judge.Agreement  `json:"agreement"`
	Verdicts  []*judge.Verdict `json:"verdicts"`
}

const verdictsSchema = "forkvm/verdicts/v1"

// showVerdicts prints verdicts on one rollout. The verb has failed unless all of them
// are numbers, and the same one.
func (a *app) showVerdicts(verdicts []*judge.Verdict, several bool) error {
	agreement := judge.Agree(verdicts)
	var err error
	switch {
	case a.format == output.JSON && several:
		err = output.WriteJSON(a.Stdout, verdictsView{verdictsSchema, agreement, verdicts})
	case a.format == output.JSON:
		err = output.WriteJSON(a.Stdout, verdicts[0])
	default:
		err = show(a, verdictList(verdicts))
		if err == nil && a.format == output.Table {
			a.explainVerdicts(verdicts, agreement, several)
		}
	}
	if err == nil && (agreement.Outcomes[judge.Scored] < len(verdicts) || !agreement.Agreed) {
		return exitCode(exitFailure)
	}
	return err
}

func verdictList(verdicts []*judge.Verdict) output.List[*judge.Verdict] {
	way := func(r *judge.Result) string {
		if r == nil {
			return ""
		}
		return r.Summary()
	}
	return output.List[*judge.Verdict]{
		Header: []string{"OUTCOME", "REWARD", "FORK", "TRANSPLANT", "TIME"},
		Row: func(v *judge.Verdict) []string {
			return []string{string(v.Outcome), number(v.Reward), way(v.Fork), way(v.Transplant), (time.Duration(v.DurationMS) * time.Millisecond).String()}
		},
		Name: func(v *judge.Verdict) string {
			if v.Reward != nil {
				return number(v.Reward)
			}
			return string(v.Outcome)
		},
		Items: verdicts,
	}
}

func number(n *float64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatFloat(*n, 'g', -1, 64)
}

// explainVerdicts says to people why there is no number.
func (a *app) explainVerdicts(verdicts []*judge.Verdict, agreement judge.Agreement, several bool) {
	for _, v := range verdicts {
		if v.Detail != "" {
			fmt.Fprintf(a.Stderr, "forkvm: %s: %s\n", v.Outcome, output.Visible(v.Detail))
		}
		if len(v.Retried) > 0 {
			fmt.Fprintf(a.Stderr, "forkvm: the machine had failed before (%d times)\n", len(v.Retried))
		}
		for _, r := range []*judge.Result{v.Fork, v.Transplant} {
			if v.Outcome != judge.Scored && r != nil && r.Run != nil {
				showTail(a.Stderr, r.Run)
			}
		}
	}
	if several && !agreement.Agreed {
		fmt.Fprintf(a.Stderr, "forkvm: the verdicts do not agree\n")
	}
}

// shownLines is how many lines of a verifier's output people are shown.
const shownLines = 10

func showTail(w io.Writer, r *judge.Run) {
	for _, text := range []string{r.Stdout.Tail, r.Stderr.Tail} {
		lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
		for _, line := range lines[max(0, len(lines)-shownLines):] {
			if line != "" {
				fmt.Fprintf(w, "  | %s\n", output.Visible(line))
			}
		}
	}
}

func (a *app) taskVerbs() *cobra.Command {
	cmd := &cobra.Command{Use: "task", Short: "Check tasks", RunE: groupHelp, Args: cobra.ArbitraryArgs}
	cmd.AddCommand(a.taskVerifyVerb())
	return cmd
}

func (a *app) taskVerifyVerb() *cobra.Command {
	var flags verifierFlags
	var trial node.Trial
	cmd := &cobra.Command{
		Use:     "verify [flags] DIR --snapshot NAME",
		Short:   "Judge a task's own solution, and doing nothing, before it is used",
		Example: "  forkvm task verify tasks/sums --snapshot sums -n 5",
		Args:    needs("DIR"),
	}
	f := cmd.Flags()
	flags.add(f)
	f.StringVar(&trial.Snapshot, "snapshot", "", "the task's snapshot")
	f.IntVarP(&trial.Count, "count", "n", 3, fmt.Sprintf("how many rollouts of each kind, 1 to %d", maxRepeat))
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		switch {
		case trial.Snapshot == "":
			return usagef("--snapshot is needed")
		case trial.Count < 1 || trial.Count > maxRepeat:
			return usagef("--count %d: 1 to %d are possible", trial.Count, maxRepeat)
		}
		flags.task = args[0]
		t, err := a.openTask(flags.task)
		if err != nil {
			return err
		}
		if trial.Request, err = flags.fromTask(a, t); err != nil {
			return err
		}
		if trial.Solution, err = judge.Solutions(t, flags.step, a.lookup); err != nil {
			return &usageError{err}
		}
		result, err := n.TryTask(ctx, trial)
		if err != nil {
			return err
		}
		return a.showTrial(result)
	})
	return a.withOutput(cmd)
}

// trialRow is a line of the table of task verify.
type trialRow struct {
	name   string
	trials judge.Trials
}

func (a *app) showTrial(t *judge.Trial) error {
	var err error
	if a.format.Machine() {
		err = output.WriteObject(a.Stdout, a.format, t)
	} else {
		err = show(a, output.List[trialRow]{
			Header: []string{"SOLUTION", "COUNT", "OUTCOMES", "REWARDS"},
			Row: func(r trialRow) []string {
				return []string{r.name, strconv.Itoa(r.trials.Count), outcomes(r.trials.Agreement), numbers(r.trials.Rewards)}
			},
			Name:  func(r trialRow) string { return r.name },
			Items: []trialRow{{"own", t.Solution}, {"empty", t.Empty}},
		})
		for _, p := range t.Problems {
			fmt.Fprintf(a.Stderr, "forkvm: %s\n", output.Visible(p))
		}
	}
	if !t.Accepted {
		err = errors.Join(err, exitCode(exitFailure))
	}
	return err
}

func outcomes(a judge.Agreement) string {
	var list []string
	for o, n := range a.Outcomes {
		list = append(list, fmt.Sprintf("%s %d", o, n))
	}
	return strings.Join(list, ", ")
}

func numbers(list []float64) string {
	texts := make([]string, len(list))
	for i, n := range list {
		texts[i] = number(&n)
	}
	return strings.Join(texts, ", ")
}
