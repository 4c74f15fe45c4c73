package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/forkvm/forkvm/internal/lab"
	"github.com/forkvm/forkvm/internal/lab/gotest"
	"github.com/forkvm/forkvm/internal/testkit"
)

// testTree is where test binaries are built, below the working directory.
const testTree = ".cache/tests"

func runTests(ctx context.Context, args []string) (int, error) {
	var o gotest.Options
	flags := flag.NewFlagSet("lab test", flag.ContinueOnError)
	flags.BoolVar(&o.Verbose, "v", false, "show the output of all tests, not only of failing packages")
	flags.StringVar(&o.Run, "run", "", "run only the tests that match `regexp`; default: those that need KVM")
	flags.StringVar(&o.Bench, "bench", "", "run the benchmarks that match `regexp`")
	flags.IntVar(&o.Count, "count", 1, "run each test `n` times")
	// A machine keeps one processor busy.
	flags.IntVar(&o.Machines, "machines", min(2, runtime.NumCPU()), "share the packages among `n` machines")
	flags.BoolVar(&o.Short, "short", false, "tell tests to be short")
	flags.DurationVar(&o.Timeout, "timeout", 0, "of one package's tests; default 10m")
	if err := flags.Parse(args); err != nil {
		return exitUsage, nil // the flag package has said why
	}
	o.Patterns = flags.Args()
	if len(o.Patterns) == 0 {
		o.Patterns = []string{"./..."}
	}
	config, err := configFromEnvironment()
	if err != nil {
		return 0, err
	}
	o.Machine, o.Tree, o.Output = config, testTree, os.Stdout
	if verbose() {
		o.Log = os.Stderr
	}
	o.Env = append(passedEnv(os.Environ(), os.Getenv(lab.EnvPass)), testkit.EnvRequire+"="+requirements(os.Getenv(testkit.EnvRequire)))
	result, err := gotest.Run(ctx, o)
	if err != nil {
		return 0, err
	}
	if n := len(result.FailedPackages); n > 0 {
		return 1, fmt.Errorf("tests failed in %d packages: %s", n, strings.Join(result.FailedPackages, ", "))
	}
	return 0, nil
}

// requirements adds to a list what the lab machine has: a test that finds it missing there is to fail.
func requirements(list string) string {
	return strings.TrimPrefix(list+",kvm,root", ",")
}
