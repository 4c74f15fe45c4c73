package judge

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/forkvm/forkvm/guest/task"
)

// Verifier is how a rollout is judged.
type Verifier struct {
	// Tests is a directory of the host that becomes /tests; empty: none is needed.
	Tests string
	// Command is run instead of /tests/test.sh.
	Command []string
	// Timeout is by the guest's clock.
	Timeout time.Duration
	// Env is added to a clean environment, or replaces what is in it.
	Env []string
	// User runs it, root if empty; Dir is its working directory, / if empty.
	User, Dir string
	task.Judging
}

// DefaultTimeout is how long a verifier has if nobody says.
const DefaultTimeout = 10 * time.Minute

// Places in the guest.
const (
	testsDir   = "/tests"
	verdictDir = "/logs/verifier"
	rewardJSON = verdictDir + "/reward.json"
	rewardText = verdictDir + "/reward.txt"
	verifyHome = "/run/forkvm/verifier"
)

// searchPath is the verifier's PATH.
var searchPath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// FromTask is how a task, or a step of it, is judged. lookup finds variables of the
// host's environment that the task refers to.
func FromTask(t *task.Task, step string, lookup func(string) (string, bool)) (Verifier, error) {
	tests, err := t.Tests(step)
	if err != nil {
		return Verifier{}, err
	}
	v := Verifier{Tests: tests, Timeout: t.Verifier.Timeout, User: t.Verifier.User, Dir: t.Environment.WorkDir, Judging: t.Judging}
	v.Env, err = Environ(t.Verifier.Env, lookup)
	return v, err
}

// Environ expands the variables of a task.
func Environ(env map[string]string, lookup func(string) (string, bool)) ([]string, error) {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		value, err := task.Expand(env[name], lookup)
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", name, err)
		}
		list = append(list, name+"="+value)
	}
	return list, nil
}

// shellPrefix marks a verifier that is a command.
const shellPrefix = "sh:"

// ParseSpec is a verifier without a task: a directory with test.sh, or "sh:" and a
// command for the shell, whose exit code is the verdict.
func ParseSpec(spec string) (Verifier, error) {
	v := Verifier{Timeout: DefaultTimeout, Judging: task.Judging{
		Where: task.Both, Score: task.ScoreReward,
		ArtifactBytes: task.DefaultArtifactBytes, ArtifactEntries: task.DefaultArtifactEntries,
	}}
	if command, ok := strings.CutPrefix(spec, shellPrefix); ok {
		if strings.TrimSpace(command) == "" {
			return v, errors.New("verifier sh: has no command")
		}
		v.Command, v.Score = []string{"/bin/sh", "-c", command}, task.ScoreExitCode
		return v, nil
	}
	v.Tests = spec
	info, err := os.Stat(spec)
	if err == nil && !info.IsDir() {
		err = errors.New("is no directory")
	}
	if err == nil {
		_, err = os.Stat(spec + "/" + task.TestProgram)
	}
	if err != nil {
		return v, fmt.Errorf("verifier %s: %w (a verifier is a directory with %s, or %sCOMMAND)", spec, err, task.TestProgram, shellPrefix)
	}
	return v, nil
}

// Check refuses what cannot be judged with.
func (v *Verifier) Check() error {
	switch {
	case v.Tests == "" && len(v.Command) == 0:
		return errors.New("verifier has neither tests nor a command")
	case v.Timeout <= 0:
		return errors.New("verifier has no time to run")
	case v.Where != task.Both && v.Where != task.Fork && v.Where != task.Transplant:
		return fmt.Errorf("judging %q is none of both, fork, transplant", v.Where)
	case v.Score != task.ScoreReward && v.Score != task.ScoreExitCode && v.Score != task.ScoreJUnit:
		return fmt.Errorf("score %q is none of reward, exit_code, junit", v.Score)
	case v.Score == task.ScoreJUnit && v.JUnit == "":
		return errors.New("score junit needs the path of the report")
	case v.ArtifactBytes <= 0 || v.ArtifactEntries <= 0:
		return errors.New("nothing may be transplanted: the limits are 0")
	}
	return v.Judging.Check()
}

// hash is of everything that decides how is judged.
func (v *Verifier) hash(testsSum string) (string, error) {
	settings, err := json.Marshal(struct {
		Version int
		Command []string
		Timeout time.Duration
		Env     []string
		User    string
		Dir     string
		Judging task.Judging
	}{1, v.Command, v.Timeout, v.Env, v.User, v.Dir, v.Judging})
	if err != nil {
		return "", fmt.Errorf("hash verifier: %w", err)
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\n%s\n", testsSum, settings)
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}
