package task

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Task is a task directory that was read and found sound.
type Task struct {
	// Dir is the directory.
	Dir string
	// Name is the task's, or the directory's if it gives none.
	Name          string
	SchemaVersion string
	// Instruction is what the policy is told: instruction.md. Empty if the task has
	// steps, which have their own.
	Instruction string
	Agent       Agent
	Verifier    Verifier
	Environment Environment
	// SolutionEnv is the environment of the task's own solution.
	SolutionEnv map[string]string
	// Steps are empty for a task of one.
	Steps []Step
	// StepRewards says how the rewards of the steps become one: "mean" or "final".
	StepRewards string
	Judging     Judging
	// Warnings are what may be a mistake: names that nobody knows, a transplant of
	// nothing.
	Warnings []string
}

// Agent is the phase in which the policy works.
type Agent struct {
	// Timeout is 0 if there is none.
	Timeout time.Duration
	User    string
	Network Network
}

// Verifier is the phase in which its work is judged.
type Verifier struct {
	Timeout time.Duration
	// Env has references to the host's environment, see Expand.
	Env     map[string]string
	User    string
	Network Network
}

// Environment is the machine that the policy works in.
type Environment struct {
	BuildTimeout time.Duration
	Image        string // docker_image
	OS           string
	// CPUs, MemoryMB and StorageMB are 0 if the task does not say.
	CPUs, MemoryMB, StorageMB int
	// WorkDir is empty if the task does not say.
	WorkDir     string
	Env         map[string]string
	Network     Network
	Healthcheck *Healthcheck
}

// Healthcheck is a command that succeeds once the environment is ready.
type Healthcheck struct {
	Command                        string
	Interval, Timeout, StartPeriod time.Duration
	Retries                        int
}

// Network is what may be reached.
type Network struct {
	// Mode is "public", "no-network", "allowlist", or empty if the task does not
	// say.
	Mode string
	// Hosts are names, or *.name for what is below one.
	Hosts []string
}

// Step is one of several in a task.
type Step struct {
	Name string
	// MinReward is what the step must have before the next one begins, nil for
	// anything.
	MinReward *float64
}

// Artifact is what of a rollout is transplanted into the machine that is judged.
type Artifact struct {
	// Source is an absolute path in the guest; * and ? stand for parts of names.
	Source string
	// Destination is an absolute path; the same as Source if empty.
	Destination string
	// Exclude are patterns (path.Match) of names that are left out, wherever below
	// Source they are.
	Exclude []string
}

const (
	configFile      = "task.toml"
	instructionFile = "instruction.md"
	// maxText bounds the two.
	maxText = 1 << 20
)

// Error is a mistake in a task directory. Its text names the file and, if there is
// one, the field.
type Error struct {
	// File is below the task directory; Field is as in "verifier.timeout_sec".
	File, Field string
	Err         error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("task: %s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("task: %s: %s: %v", e.File, e.Field, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Open reads a task directory. The error has all mistakes that were found, each an
// *Error.
func Open(dir string) (*Task, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("task: open directory: %w", err)
	}
	defer root.Close()
	text, err := readText(root, configFile)
	if err != nil {
		return nil, &Error{File: configFile, Err: err}
	}
	t, err := parse(text)
	if err != nil {
		return nil, err
	}
	if t.Dir, err = filepath.Abs(dir); err != nil {
		return nil, fmt.Errorf("task: %w", err)
	}
	if t.Name == "" {
		t.Name = filepath.Base(t.Dir)
	}
	return t, t.readFiles(root)
}

// readFiles reads and looks for what task.toml does not have.
func (t *Task) readFiles(root *os.Root) error {
	if len(t.Steps) == 0 {
		instruction, err := readText(root, instructionFile)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return &Error{File: instructionFile, Err: err}
		}
		t.Instruction = string(instruction)
	}
	var errs []error
	for _, dir := range t.testDirs() {
		if err := requireFile(root, filepath.Join(dir, TestProgram)); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func requireFile(root *os.Root, name string) error {
	info, err := root.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &Error{File: name, Err: errors.New("does not exist, and nothing else says how the task is judged")}
	case err != nil:
		return &Error{File: name, Err: err}
	case !info.Mode().IsRegular():
		return &Error{File: name, Err: errors.New("is not a regular file")}
	}
	return nil
}

// TestProgram is what is run to judge, in the directory of tests.
const TestProgram = "test.sh"

// SolutionProgram is what is run to solve the task, in the directory of the
// solution.
const SolutionProgram = "solve.sh"

// testDirs are the directories of tests, relative to the task's.
func (t *Task) testDirs() []string {
	if len(t.Steps) == 0 {
		return []string{"tests"}
	}
	dirs := make([]string, len(t.Steps))
	for i, s := range t.Steps {
		dirs[i] = filepath.Join("steps", s.Name, "tests")
	}
	return dirs
}

// Tests is the directory with the tests of a step, or of the task if step is empty
// and it has none.
func (t *Task) Tests(step string) (string, error) {
	base, err := t.part(step)
	return filepath.Join(base, "tests"), err
}

// Solution is the directory with the task's own solution, which may not exist.
func (t *Task) Solution(step string) (string, error) {
	base, err := t.part(step)
	return filepath.Join(base, "solution"), err
}

func (t *Task) part(step string) (string, error) {
	switch {
	case step == "" && len(t.Steps) == 0:
		return t.Dir, nil
	case step == "":
		return "", fmt.Errorf("task %s has %d steps: say which", t.Name, len(t.Steps))
	}
	for _, s := range t.Steps {
		if s.Name == step {
			return filepath.Join(t.Dir, "steps", step), nil
		}
	}
	return "", fmt.Errorf("task %s has no step %q", t.Name, step)
}

func readText(root *os.Root, name string) ([]byte, error) {
	f, err := root.Open(name)
	if err != nil {
		return nil, cause(err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(errors.New("is not a regular file"), err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err != nil {
		return nil, cause(err)
	}
	if len(text) > maxText {
		return nil, fmt.Errorf("has more than %d bytes", maxText)
	}
	if bytes.IndexByte(text, 0) >= 0 {
		return nil, errors.New("contains a NUL byte: this is no text")
	}
	return text, nil
}

// cause is an error without the path that Error names.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
