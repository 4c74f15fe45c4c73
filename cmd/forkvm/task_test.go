package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/testkit"
)

// realTask is the quickstart's: a git repository whose code talks to PostgreSQL, in a Debian that systemd has started, with
// tests that no policy sees.
type realTask struct {
	*host
	dir string
}

const (
	realSnapshot = "ledger"
	realProject  = "/srv/ledger"
)

func newRealTask(t *testing.T) *realTask {
	t.Helper()
	testkit.Long(t)
	testkit.RequireKVM(t)
	data, dir := testkit.RequireEnvironment(t)
	r := &realTask{newHost(t, data), dir}
	if slices.Contains(strings.Fields(r.must("snapshot", "ls", "-q")), realSnapshot) {
		return r
	}
	r.must("create", slowly, "--name", "builder", "--memory", "768M", "--ready", "unit:postgresql.service",
		"--ready", "command:psql -qAt -c 'SELECT count(*) FROM accounts' ledger", "ledger")
	// One run before the freeze leaves the interpreter and its modules in the page cache.
	if got := r.forkvm("exec", "-u", "dev", "-w", realProject, "builder", "--", "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"); got.code != 1 {
		t.Fatalf("one of the project's tests fails: %v", got)
	}
	r.must("snapshot", "builder", realSnapshot, "--task", "ledger")
	r.must("rm", "-f", "builder")
	return r
}

// in is the same for a part of the test.
func (r *realTask) in(t *testing.T) *realTask {
	return &realTask{&host{t: t, data: r.data, run: r.run}, r.dir}
}

// rollout is a VM in which a policy has done something: the task's own solution, and then a script of root's.
func (r *realTask) rollout(name string, solved bool, script string) {
	r.t.Helper()
	r.must("create", slowly, "--snapshot", realSnapshot, "--name", name)
	if solved {
		r.must("cp", filepath.Join(r.dir, "solution", "fix.patch"), name+":/tmp/fix.patch")
		r.must("exec", "-u", "dev", "-w", realProject, name, "--", "git", "apply", "/tmp/fix.patch")
	}
	if script != "" {
		r.sh(name, script)
	}
}

// judge has a VM judged and compares the verdict and the exit code with what is wanted, in the words of its summary.
func (r *realTask) judge(vm, dir, want string, args ...string) *judge.Verdict {
	r.t.Helper()
	return r.verdict(r.forkvm(append([]string{"reward", vm, "--task", dir, "-o", "json"}, args...)...), want)
}

func (r *realTask) verdict(got result, want string) *judge.Verdict {
	r.t.Helper()
	var v judge.Verdict
	if err := json.Unmarshal([]byte(got.stdout), &v); err != nil {
		r.t.Fatalf("%v: %v", err, got)
	}
	r.t.Logf("%s: %s in %d ms (%s)", v.Mode, v.Summary(), v.DurationMS, v.Detail)
	code := 0
	if v.Outcome != judge.Scored {
		code = 1
	}
	if v.Summary() != want || got.code != code {
		r.t.Errorf("got %s (%s), exit code %d; want %s, %d", v.Summary(), v.Detail, got.code, want, code)
		for _, way := range []*judge.Result{v.Fork, v.Transplant} {
			if way != nil {
				r.t.Logf("%s: %s\n%s", way.Summary(), way.Detail, told(way.Run))
			}
		}
	}
	return &v
}

// told is what a verifier has printed.
func told(run *judge.Run) string {
	if run == nil {
		return ""
	}
	return fmt.Sprintf("exit code %d\n%s%s", run.ExitCode, run.Stdout.Tail, run.Stderr.Tail)
}

// variant is the task with other files in the place of some of its own.
func (r *realTask) variant(files map[string]string) (dir string) {
	r.t.Helper()
	dir = filepath.Join(r.t.TempDir(), "task")
	if err := os.CopyFS(dir, os.DirFS(r.dir)); err != nil {
		r.t.Fatal(err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			r.t.Fatal(err)
		}
	}
	return dir
}

// edited is a test of the project that passes whatever the code does.
const edited = "sed -i 's/assert balance(ledger, \"alice\") == 10000/pass/' " + realProject + "/tests/test_transfers.py; " +
	"cd " + realProject + "; runuser -u dev -- python3 -m pytest -q -p no:cacheprovider >&2"

// TestRealTask judges rollouts of a real task, by the command line.
func TestRealTask(t *testing.T) {
	r := newRealTask(t)
	for _, c := range []struct {
		name   string
		solved bool
		script string
		modes  []string
		want   string
	}{
		{"the right patch", true, "", []string{"both", "fork", "transplant"}, "scored 1"},
		{"nothing", false, "", []string{"both"}, "scored 0"},
		{"an edited test", false, edited, []string{"both"}, "scored 0"},
		// What of the database is the policy's ends; the database does not.
		{"a transaction that holds a lock", true, `setsid runuser -u dev -- psql -c 'BEGIN; LOCK accounts; SELECT pg_sleep(100000)' ledger </dev/null >/dev/null 2>&1 &
			until psql -qAt -c "SELECT 1 FROM pg_locks WHERE relation = 'accounts'::regclass AND mode = 'AccessExclusiveLock'" ledger | grep -q 1; do sleep 0.1; done`,
			[]string{"both"}, "scored 1"},
		// Then all of it is: the verifier starts it, for systemd stands still.
		{"a database that was started anew", true, "systemctl restart postgresql@*-main.service", []string{"both"}, "scored 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := r.in(t)
			r.rollout("rollout", c.solved, c.script)
			for _, mode := range c.modes {
				v := r.judge("rollout", r.dir, c.want, "--mode", mode)
				if v.Fork != nil {
					t.Logf("ended in the fork: %s", ended(v.Fork))
				}
			}
			if left := r.sh("rollout", "ls -d /tests /logs 2>/dev/null; pg_isready -q && echo up"); left != "up" {
				t.Errorf("the rollout that goes on has %q", left)
			}
			r.must("rm", "-f", "rollout")
		})
	}
	t.Run("an endless test", func(t *testing.T) {
		r := r.in(t)
		config, err := os.ReadFile(filepath.Join(r.dir, "task.toml"))
		if err != nil {
			t.Fatal(err)
		}
		dir := r.variant(map[string]string{
			"task.toml":             strings.Replace(string(config), "timeout_sec = 300", "timeout_sec = 20", 1),
			"tests/test_endless.py": "import time\n\n\ndef test_endless():\n    while True:\n        time.sleep(1)\n",
		})
		r.rollout("rollout", true, "")
		r.judge("rollout", dir, "verifier_timeout (timeout)", "--mode", "fork")
		r.must("rm", "-f", "rollout")
	})
	t.Run("a VM killed in the middle", func(t *testing.T) {
		r := r.in(t)
		r.rollout("rollout", true, "")
		r.verdict(r.killedWhileJudging("--mode", "fork", "--retries", "0"), "infra_error (machine)")
		if v := r.verdict(r.killedWhileJudging("--mode", "transplant"), "scored 1"); len(v.Retried) != 1 {
			t.Errorf("the attempt that failed is not in the verdict: %+v", v.Retried)
		}
		r.must("rm", "-f", "rollout")
	})
	t.Run("the task is tried", func(t *testing.T) {
		r := r.in(t)
		r.verify(r.dir, "")
		passes := r.variant(map[string]string{"tests/test.sh": "#!/bin/sh\npsql -qc 'SELECT 1' ledger && echo 1 >/logs/verifier/reward.txt\n"})
		r.verify(passes, "not more than the 1 of the empty one")
	})
}

func ended(result *judge.Result) string {
	var names []string
	for _, p := range result.EndedProcesses {
		names = append(names, string(p.Name))
	}
	return fmt.Sprintf("%d %q", result.Ended, names)
}

// verify tries a task, which is refused for a reason, or accepted if there is none.
func (r *realTask) verify(dir, reason string) {
	r.t.Helper()
	got := r.forkvm("task", "verify", dir, "--snapshot", realSnapshot, "-n", "1", "-o", "json")
	var trial judge.Trial
	if err := json.Unmarshal([]byte(got.stdout), &trial); err != nil {
		r.t.Fatalf("%v: %v", err, got)
	}
	if trial.Accepted != (reason == "") || trial.Accepted != (got.code == 0) || !strings.Contains(strings.Join(trial.Problems, "; "), reason) {
		r.t.Errorf("accepted %v, exit code %d, problems %q; want %q", trial.Accepted, got.code, trial.Problems, reason)
	}
}

// killedWhileJudging has "rollout" judged and kills the first VM that has got the tests.
func (r *realTask) killedWhileJudging(args ...string) result {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	killed := make(chan bool, 1)
	go func() { killed <- r.killJudge(ctx) }()
	got := r.forkvm(append([]string{"reward", "rollout", "--task", r.dir, "-o", "json"}, args...)...)
	cancel()
	if !<-killed {
		r.t.Errorf("no VM was killed: %v", got)
	}
	return got
}

func (r *realTask) killJudge(ctx context.Context) bool {
	for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		var views []view
		if json.Unmarshal([]byte(r.forkvm("ls", "-a", "-o", "json").stdout), &views) != nil {
			continue
		}
		for _, v := range views {
			if strings.HasPrefix(v.Name, "judge-") && r.forkvm("exec", v.Name, "--", "test", "-e", "/tests/test.sh").code == 0 {
				return syscall.Kill(v.PID, syscall.SIGKILL) == nil
			}
		}
	}
	return false
}
