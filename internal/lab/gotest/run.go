package gotest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
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
	Verbose  bool
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

// Result counts what ran.
type Result struct {
	Passed, Failed, Skipped int // tests, subtests not counted
	FailedPackages          []string
}

// Run builds and runs. Its error is for what kept it from doing so; failing tests are in the result.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.Log == nil {
		o.Log = io.Discard
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
	r := &runner{options: o}
	defer r.close()
	for _, b := range binaries {
		if err := r.run(ctx, b); err != nil {
			return r.result, err
		}
	}
	return r.result, nil
}

// runner runs test binaries in one machine, and in a new one after a machine has died under a test.
type runner struct {
	options Options
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
	if r.machine != nil {
		return nil
	}
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
	if r.options.Verbose || r.options.Bench != "" {
		sink = r.options.Output
	}
	limited, cancel := context.WithTimeout(ctx, r.options.Timeout+panicGrace)
	defer cancel()
	begin := time.Now()
	outcome, err := r.machine.Run(limited, r.command(b, io.MultiWriter(sink, counter)))
	took := time.Since(begin).Seconds()
	var death *lab.DeathError
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &death):
		fmt.Fprintf(sink, "%v\n", err)
		r.close()
	case err != nil:
		return err
	}
	r.result.Passed += counter.passed
	r.result.Failed += counter.failed
	r.result.Skipped += counter.skipped
	problem := ""
	switch {
	case err != nil:
		problem = string(death.Reason)
	case len(outcome.Left) > 0:
		problem = fmt.Sprintf("left processes behind:\n\t%s\n", strings.Join(outcome.Left, "\n\t"))
	case outcome.Code != 0:
		problem = fmt.Sprintf("exit status %d", outcome.Code)
	}
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
