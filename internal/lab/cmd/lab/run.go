package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/forkvm/forkvm/internal/lab"
)

// binDir is where the project's build puts its programs, below the working directory.
const binDir = "bin"

// defaultOut is where what a command leaves in /out goes.
const defaultOut = "lab/out"

// defaultTimeout bounds a command that LAB_TIMEOUT does not.
const defaultTimeout = 30 * time.Minute

func runCommand(ctx context.Context, args []string) (int, error) {
	line := strings.TrimSpace(strings.Join(args, " "))
	if line == "" {
		fmt.Fprint(os.Stderr, usage)
		return exitUsage, nil
	}
	machine, err := startMachine(ctx)
	if err != nil {
		return 0, err
	}
	defer machine.Close()
	timeout, err := timeoutFrom(os.Getenv(lab.EnvTimeout), defaultTimeout)
	if err != nil {
		return exitUsage, err
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	command := lab.Shell(line)
	command.Env = passedEnv(os.Environ(), os.Getenv(lab.EnvPass))
	command.Stdin = input()
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	outcome, err := machine.Run(limited, command)
	if err != nil {
		return 0, err
	}
	if err := collect(ctx, machine); err != nil {
		return 0, err
	}
	return outcome.Code, nil
}

// configFromEnvironment is the machine that the environment asks for, with the project's programs.
func configFromEnvironment() (lab.Config, error) {
	config, err := lab.FromEnvironment(os.Getenv)
	if err != nil {
		return lab.Config{}, err
	}
	if config.Programs, err = lab.ProgramsIn(binDir); err != nil {
		return lab.Config{}, err
	}
	if os.Getenv(lab.EnvVerbose) == "2" {
		config.Log = os.Stderr
	}
	return config, nil
}

// verbose says whether to tell what the lab itself does.
func verbose() bool { return os.Getenv(lab.EnvVerbose) != "" && os.Getenv(lab.EnvVerbose) != "0" }

func startMachine(ctx context.Context) (*lab.Machine, error) {
	config, err := configFromEnvironment()
	if err != nil {
		return nil, err
	}
	machine, err := lab.Start(ctx, config)
	if err == nil && verbose() {
		fmt.Fprintf(os.Stderr, "lab: up in %.1f s\n", machine.Up().Seconds())
	}
	if err == nil && machine.Faulty() {
		fmt.Fprintln(os.Stderr, "lab: unknown build of QEMU; if commands hang, see \"The emulator's faults\" in docs/lab.md")
	}
	return machine, err
}

// collect brings /out back. The place is emptied first when there is something to bring, so that it never shows a
// mixture of two runs.
func collect(ctx context.Context, machine *lab.Machine) error {
	out := os.Getenv(lab.EnvOut)
	if out == "" {
		out = defaultOut
	}
	fresh := filepath.Join(filepath.Dir(out), fmt.Sprintf(".%s-%d", filepath.Base(out), os.Getpid()))
	defer os.RemoveAll(fresh)
	n, err := machine.Collect(ctx, "/out", fresh)
	if err != nil || n == 0 {
		return err
	}
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	return os.Rename(fresh, out)
}

// input is standard input when it is something to read to the end: a pipe or a file, no terminal and not nothing.
func input() io.Reader {
	info, err := os.Stdin.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice != 0 {
		return nil
	}
	return os.Stdin
}

func timeoutFrom(text string, fallback time.Duration) (time.Duration, error) {
	if text == "" {
		return fallback, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("read %s: %q is no time such as 90s or 10m", lab.EnvTimeout, text)
	}
	return d, nil
}

// passedEnv picks the variables that go into the machine: the project's own, those that say how tests are to run and
// what the clock counts, and the ones that LAB_ENV names, separated by commas.
func passedEnv(environ []string, extra string) []string {
	named := map[string]bool{"REQUIRE": true, "GOMAXPROCS": true, "GODEBUG": true, "GOTRACEBACK": true, "CI": true, "NO_COLOR": true, lab.EnvCounted: true}
	for _, name := range strings.Split(extra, ",") {
		named[strings.TrimSpace(name)] = true
	}
	var passed []string
	for _, pair := range environ {
		name, _, _ := strings.Cut(pair, "=")
		if named[name] || strings.HasPrefix(name, "FORKVM_") || strings.HasPrefix(name, "SOAK_") {
			passed = append(passed, pair)
		}
	}
	return passed
}
