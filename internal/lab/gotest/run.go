package gotest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/forkvm/forkvm/internal/lab"
)

// Options says what to run and how.
type Options struct {
	Patterns []string // packages, as for the go command
	Tree     string   // directory for what is built; kept for the next run
	Run      string   // regular expression of tests, instead of all that need KVM
	Bench    string   // regular expression of benchmarks; without Run, no tests run then
	Count    int      // 0: 1
	Short    bool
	Verbose  bool          // show all output as it comes, which takes a single machine
	Machines int           // how many at once; 0: 1
	Timeout  time.Duration // of one package's tests; 0: 10 minutes
	Env      []string
	Machine  lab.Config // its In gets the tree
	Output   io.Writer  // what go test would print
	Log      io.Writer  // what the lab does; nil discards
}

const (
	defaultTimeout = 10 * time.Minute
	// panicGrace is the time that a test binary has for showing its stacks after its own time has run out.
	panicGrace = 30 * time.Second
)

// streams says whether output is shown as it comes.
func (o Options) streams() bool { return o.Verbose || o.Bench != "" }

// Result counts what ran.
type Result struct {
	Passed, Failed, Skipped int // tests, subtests not counted
	FailedPackages          []string
}

func (r *Result) add(other Result) {
	r.Passed += other.Passed
	r.Failed += other.Failed
	r.Skipped += other.Skipped
	r.FailedPackages = append(r.FailedPackages, other.FailedPackages...)
}

// Run builds and runs. Its error is for what kept it from doing so; failing tests are in the result.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	if o.streams() {
		o.Machines = 1
	}
	packages, err := List(ctx, o.Patterns...)
	if err != nil {
		return Result{}, err
	}
	selections, err := Discover(packages)
	if err != nil {
		return Result{}, err
	}
	if len(selections) == 0 {
		fmt.Fprintln(o.Log, "no tests that need the lab")
		return Result{}, nil
	}
	binaries, err := buildTree(ctx, o.Tree, selections)
	if err != nil {
		return Result{}, err
	}
	return runAll(ctx, o, binaries)
}

// runAll runs the binaries on as many machines as are asked for, each package wherever one is free.
func runAll(ctx context.Context, o Options, binaries []binary) (Result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	queue := make(chan binary, len(binaries))
	for _, b := range binaries {
		queue <- b
	}
	close(queue)
	var group sync.WaitGroup
	runners := make([]*runner, min(max(1, o.Machines), len(binaries)))
	var output sync.Mutex
	for i := range runners {
		r := &runner{options: o, output: &output}
		runners[i] = r
		group.Go(func() {
			defer r.close()
			for b := range queue {
				if err := r.run(ctx, b); err != nil {
					cancel(err) // of all; the first one's is told
					return
				}
			}
		})
	}
	group.Wait()
	var total Result
	for _, r := range runners {
		total.add(r.result)
	}
	return total, context.Cause(ctx)
}

// runner runs test binaries in one machine, and in a new one after a machine has died under a test.
type runner struct {
	options Options
	output  *sync.Mutex // held while writing to options.Output what is not to be mixed with another package's
	machine *lab.Machine
	result  Result
}

func (r *runner) close() {
	if r.machine != nil {
		_ = r.machine.Close()
		r.machine = nil
	}
}

func (r *runner) start(ctx context.Context) error {
	if r.machine != nil && r.machine.Alive() {
		return nil
	}
	r.close()
	config := r.options.Machine
	config.In = append(append([]string{}, config.In...), r.options.Tree)
	machine, err := lab.Start(ctx, config)
	if err != nil {
		return err
	}
	fmt.Fprintf(r.options.Log, "lab up in %.1f s\n", machine.Up().Seconds())
	r.machine = machine
	return nil
}

// run runs one package's tests and prints what go test would.
func (r *runner) run(ctx context.Context, b binary) error {
	if err := r.start(ctx); err != nil {
		return err
	}
	name := b.selection.Package.ImportPath
	var kept bytes.Buffer
	counter := &counter{}
	sink := io.Writer(&kept)
	if r.options.streams() {
		sink = r.options.Output
	}
	limited, cancel := context.WithTimeout(ctx, r.options.Timeout+panicGrace)
	defer cancel()
	begin := time.Now()
	outcome, err := r.machine.Run(limited, r.command(b, io.MultiWriter(sink, counter)))
	took := time.Since(begin).Seconds()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	problem, err := verdict(outcome, err)
	if err != nil {
		return err
	}
	r.result.Passed += counter.passed
	r.result.Failed += counter.failed
	r.result.Skipped += counter.skipped
	r.output.Lock()
	defer r.output.Unlock()
	if problem == "" {
		fmt.Fprintf(r.options.Output, "ok  \t%s\t%.3fs%s\n", name, took, counter.note())
		return nil
	}
	_, _ = kept.WriteTo(r.options.Output)
	fmt.Fprintf(r.options.Output, "%s\nFAIL\t%s\t%.3fs\n", problem, name, took)
	r.result.FailedPackages = append(r.result.FailedPackages, name)
	if counter.failed == 0 {
		r.result.Failed++
	}
	return nil
}

// verdict is what is wrong with a test binary's run, "" for nothing. An error is one of the lab itself.
func verdict(outcome lab.Outcome, err error) (string, error) {
	var death *lab.DeathError
	var stopped *lab.StoppedError
	switch {
	case errors.As(err, &death), errors.As(err, &stopped):
		return err.Error(), nil
	case err != nil:
		return "", err
	}
	var problems []string
	if outcome.Code != 0 {
		problems = append(problems, fmt.Sprintf("exit status %d", outcome.Code))
	}
	if len(outcome.Left) > 0 {
		problems = append(problems, "left processes behind:\n\t"+strings.Join(outcome.Left, "\n\t"))
	}
	return strings.Join(problems, "\n"), nil
}

func (r *runner) command(b binary, out io.Writer) lab.Command {
	o := r.options
	root := filepath.Join("/in", filepath.Base(o.Tree))
	run := o.Run
	switch {
	case run == "" && o.Bench != "":
		run = "^$"
	case run == "":
		run = "^(" + strings.Join(b.selection.Names, "|") + ")$"
	}
	argv := []string{filepath.Join(root, b.file), "-test.v", "-test.paniconexit0",
		"-test.timeout=" + o.Timeout.String(), "-test.run=" + run}
	if o.Bench != "" {
		argv = append(argv, "-test.bench="+o.Bench, "-test.benchmem")
	}
	if o.Count > 1 {
		argv = append(argv, fmt.Sprintf("-test.count=%d", o.Count))
	}
	if o.Short {
		argv = append(argv, "-test.short")
	}
	return lab.Command{Argv: argv, Env: o.Env, Dir: filepath.Join(root, b.dir), Stdout: out, Stderr: out, KillLeft: true}
}
