package forkvm_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/guest/task"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/store"
)

// rightAnswer is a verifier: the answer must be what the tests expect.
const rightAnswer = `#!/bin/sh
if [ "$(cat /srv/work/answer 2>/dev/null)" = "$(cat /tests/expected)" ]; then r=1; else r=0; fi
echo $r >/logs/verifier/reward.txt
`

// judging judges by a program and one file that it may read.
func judging(t *testing.T, where task.Where, program string) forkvm.Judging {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{"test.sh": program, "expected": "42\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	v, err := forkvm.ParseVerifier(dir)
	if err != nil {
		t.Fatal(err)
	}
	v.Where, v.Artifacts, v.Timeout = where, []task.Artifact{{Source: "/srv/work"}}, 2*time.Minute
	return forkvm.Judging{Verifier: v}
}

// rollouts are machines of one task.
type rollouts struct {
	store    *store.Store
	snapshot string
}

// taskSnapshot is of a guest in which a scheduler and a service run.
func taskSnapshot(t *testing.T, ctx context.Context) rollouts {
	t.Helper()
	st, name := parent(t, ctx, 1)
	parents.Lock()
	defer parents.Unlock()
	const judged = "judged"
	if err, made := parents.made[judged]; made {
		if err != nil {
			t.Fatal(err)
		}
		return rollouts{st, judged}
	}
	vm := restore(t, ctx, st, name, forkvm.Config{Name: judged})
	sh(t, ctx, vm, `mkdir -p /var/spool/cron/crontabs /etc/forkvm/resume.d /srv
		crond </dev/null >/dev/null 2>&1
		setsid sh -c 'while :; do sleep 3600; done' service </dev/null >/dev/null 2>&1 &`)
	_, err := vm.Snapshot(ctx, st, judged)
	parents.made[judged] = err
	if err != nil {
		t.Fatal(err)
	}
	return rollouts{st, judged}
}

// start makes a rollout in which a script has run as root.
func (r rollouts) start(t *testing.T, ctx context.Context, script string) *forkvm.VM {
	t.Helper()
	vm := restore(t, ctx, r.store, r.snapshot, forkvm.Config{Name: "rollout"})
	sh(t, ctx, vm, "mkdir -p /srv/work; "+script)
	return vm
}

// judgedBefore tells whether it is known what a verdict takes.
func (r rollouts) judgedBefore(t *testing.T) bool {
	t.Helper()
	manifest, err := r.store.Stat(r.snapshot)
	if err != nil {
		t.Fatal(err)
	}
	set := r.store.JudgingSet(manifest, false)
	if set == nil {
		return false
	}
	defer set.Close()
	_, err = set.Read()
	return err == nil
}

func (r rollouts) judge(t *testing.T, ctx context.Context, vm *forkvm.VM, j forkvm.Judging) *forkvm.Verdict {
	t.Helper()
	v, err := vm.Judge(ctx, r.store, r.snapshot, j)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s in %d ms (%s)", v.Summary(), v.DurationMS, v.Detail)
	return v
}

// expect compares a verdict, in the words of its summary.
func expect(t *testing.T, what string, v *forkvm.Verdict, want string) {
	t.Helper()
	if got := v.Summary(); got != want {
		t.Errorf("%s: got %s (%s), want %s", what, got, v.Detail, want)
		for _, r := range []*judge.Result{v.Fork, v.Transplant} {
			if r != nil {
				t.Logf("%s: %s; %+v", r.Summary(), r.Detail, r.Run)
			}
		}
	}
}

// TestJudge judges rollouts that have solved a task, have not, and have edited its
// tests, in the two ways side by side; and the rollout that was judged goes on.
func TestJudge(t *testing.T) {
	ctx := begin(t)
	task1 := taskSnapshot(t, ctx)
	vm := task1.start(t, ctx, "echo 42 >/srv/work/answer; setsid sh -c 'while :; do sleep 0.1; date >/srv/ticks; done' mine </dev/null >/dev/null 2>&1 &")
	good := judging(t, task.Both, rightAnswer)
	v := task1.judge(t, ctx, vm, good)
	expect(t, "right answer", v, "scored 1")
	if v.Fork == nil || v.Fork.Ended == 0 || v.Transplant.Artifacts.Entries != 2 || len(v.Rollout.Lineage) == 0 {
		t.Errorf("evidence %+v %+v", v.Fork, v.Transplant)
	}
	if left := sh(t, ctx, vm, "ls -d /tests /logs 2>/dev/null; ps | grep -c '[s]leep 0.1\\|[m]ine'"); left == "0" || strings.Contains(left, "/") {
		t.Errorf("the rollout has %q", left)
	}
	if !task1.judgedBefore(t) {
		t.Error("the verdict has not noted what it took, for later ones")
	}
	sh(t, ctx, vm, "echo 41 >/srv/work/answer; mkdir /tests; echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh")
	again := task1.judge(t, ctx, vm, good)
	expect(t, "edited tests", again, "scored 0")
	if again.VerifierHash != v.VerifierHash {
		t.Error("one verifier has two hashes")
	}
	endless := judging(t, task.Fork, "#!/bin/sh\necho begun; while :; do sleep 1; done\n")
	endless.Timeout = 2 * time.Second
	expect(t, "endless test", task1.judge(t, ctx, vm, endless), "verifier_timeout (timeout)")
	if err := vm.Close(); err != nil {
		t.Fatal(err)
	}
	expect(t, "killed machine", task1.judge(t, ctx, vm, good), "infra_error (machine)")
}

// meddling makes machines for a judge and lets a test do something to them.
type meddling struct {
	t    *testing.T
	vm   *forkvm.VM
	from rollouts
	// forked is called for each fork, with its number from 0 on.
	forked func(vm *forkvm.VM, n int)

	mu    sync.Mutex
	forks int
}

func (m *meddling) Fork(ctx context.Context) (judge.Machine, error) {
	children, err := m.vm.Fork(ctx, config(m.t, forkvm.Config{Name: "fork"}))
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	n := m.forks
	m.forks++
	m.mu.Unlock()
	m.forked(children[0], n)
	return meddled{children[0]}, nil
}

func (m *meddling) Clean(ctx context.Context) (judge.Machine, error) {
	vm, err := forkvm.Restore(ctx, m.from.store, m.from.snapshot, config(m.t, forkvm.Config{Name: "clean"}))
	if err != nil {
		return nil, err
	}
	return meddled{vm}, nil
}

type meddled struct{ *forkvm.VM }

func (m meddled) ID() string         { return "machine" }
func (m meddled) Guest() judge.Guest { return m.Agent() }
func (m meddled) NoteUse()           {}
func (m meddled) Health(context.Context) judge.Health {
	if exit := m.Exit(); exit != nil {
		return judge.EndOf(exit)
	}
	return judge.Health{}
}

// fillDisk leaves not one block. ext4 reserves more for what it has not written yet than that takes in the end.
const fillDisk = "#!/bin/sh\nfor i in 1 2 3; do dd if=/dev/zero of=/fill$i bs=4k 2>/dev/null; sync; done\n"

// TestCaseH2: failures of the machine and of the verifier are never a reward of 0.
func TestCaseH2(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	task1 := taskSnapshot(t, ctx)
	vm := task1.start(t, ctx, "echo 41 >/srv/work/answer")
	for _, c := range []struct{ name, program, want string }{
		{"result 0 written properly", rightAnswer, "scored 0"},
		{"crash before writing", "#!/bin/sh\nkill -SEGV $$\n", "verifier_error (signal)"},
		{"exit before writing", "#!/bin/sh\nexit 1\n", "verifier_error (exit_code)"},
		{"end without writing", "#!/bin/sh\n", "no_verdict (verdict_missing)"},
		{"result 1 and then a failure", "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\nexit 1\n", "verifier_error (exit_code)"},
		{"result 0 and then a failure", "#!/bin/sh\necho 0 >/logs/verifier/reward.txt\nexit 1\n", "verifier_error (exit_code)"},
		{"no name server", "#!/bin/sh\nset -e\nwget -T 2 http://example.org/tool\necho 1 >/logs/verifier/reward.txt\n", "verifier_error (exit_code)"},
		{"disk full", fillDisk + "echo 1 >/logs/verifier/reward.txt\nexit 0\n", "no_verdict (verdict_empty)"},
		{"out of memory", "#!/bin/sh\nguestload hog -size 4096\necho 0 >/logs/verifier/reward.txt\n", "oom (oom_killed)"},
		{"the verifier's interpreter is missing", "#!/usr/bin/none\n", "verifier_error (not_invoked)"},
		{"guest ended by the verifier", "#!/bin/sh\necho b >/proc/sysrq-trigger\nsleep 100\n", "verifier_error (guest_ended)"},
		{"not a number", "#!/bin/sh\necho nan >/logs/verifier/reward.txt\n", "verifier_error (verdict_not_finite)"},
		{"above 1", "#!/bin/sh\necho '{\"reward\": 1.5}' >/logs/verifier/reward.json\n", "verifier_error (verdict_out_of_range)"},
		{"verdict is a link", "#!/bin/sh\necho 1 >/one; ln -s /one /logs/verifier/reward.txt\n", "verifier_error (verdict_not_regular)"},
		{"verdict written behind the verifier's back", "#!/bin/sh\necho 0 >/logs/verifier/reward.txt; setsid sh -c 'while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.01; echo 0 >/logs/verifier/reward.txt; done' </dev/null >/dev/null 2>&1 &\nexit 3\n", "verifier_error (exit_code)"},
	} {
		expect(t, c.name, task1.judge(t, ctx, vm, judging(t, task.Both, c.program)), c.want)
	}
	slow := judging(t, task.Both, "#!/bin/sh\necho begun\nsleep 20\necho 0 >/logs/verifier/reward.txt\n")
	timeout := slow
	timeout.Timeout = 3 * time.Second
	v := task1.judge(t, ctx, vm, timeout)
	expect(t, "verifier timeout", v, "verifier_timeout (timeout)")
	if r := v.Fork.Run; r == nil || r.DurationMS < 3000 || r.LastOutputMS < 0 || r.Stdout.Tail != "begun\n" {
		t.Errorf("evidence %+v", r)
	}
	// The machine is killed while the verifier runs: once, and each time.
	for times, want := range map[int]string{1: "scored 0", 2: "infra_error (machine)"} {
		m := &meddling{t: t, vm: vm, from: task1, forked: func(fork *forkvm.VM, n int) {
			if n >= times {
				return
			}
			go func() {
				for ctx.Err() == nil && fork.Exit() == nil {
					if out, err := attempt(ctx, fork, "cat /tests/expected 2>/dev/null"); err == nil && out != "" {
						fork.Close()
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
			}()
		}}
		v, err := judge.Judge(ctx, m, slow)
		if err != nil {
			t.Fatal(err)
		}
		if expect(t, "killed machine", v, want); len(v.Retried) != 1 || v.Retried[0].Fork.Outcome != forkvm.InfraError {
			t.Errorf("retried %+v", v.Retried)
		}
	}
}
