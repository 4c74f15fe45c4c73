package cli

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/guest/task"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/node"
)

// judged gives the VMs of a fake node verdicts.
func (n *fakeNode) judged() {
	reward := func(n float64) *float64 { return &n }
	verdict := func(v judge.Verdict) *judge.Verdict {
		v.Schema, v.ID, v.Task, v.Mode, v.VerifierHash, v.Started, v.DurationMS = judge.Schema, id(7), "example/sums", task.Both, "sha256:ab", epoch, 1200
		return &v
	}
	run := &judge.Run{ExitCode: 0, DurationMS: 900, LastOutputMS: 850, Stdout: judge.Output{Bytes: 5, SHA256: "cd", Tail: "1 of 2\n\x1b[31mfailed\n"}}
	good := func(n float64) *judge.Result { return &judge.Result{Outcome: judge.Scored, Reward: reward(n)} }
	n.vms[0].verdicts = []*judge.Verdict{verdict(judge.Verdict{Outcome: judge.Scored, Reward: reward(1), Fork: good(1), Transplant: good(1)})}
	n.vms[1].verdicts = []*judge.Verdict{verdict(judge.Verdict{
		Outcome: judge.Disagreement, Detail: "fork: scored 1; transplant: no_verdict (verdict_missing)",
		Fork: good(1), Transplant: &judge.Result{Outcome: judge.NoVerdict, Reason: judge.ReasonMissing, Run: run},
	})}
	n.trial = &judge.Trial{
		Schema: judge.TrialSchema, Task: "example/sums", Problems: []string{"the empty solution passes with 1"},
		Solution: judge.Trials{Agreement: judge.Agree(n.vms[0].verdicts), Verdicts: n.vms[0].verdicts},
		Empty:    judge.Trials{Agreement: judge.Agree(n.vms[0].verdicts), Verdicts: n.vms[0].verdicts},
	}
}

func TestVerifierFlagsReachTheJudge(t *testing.T) {
	s := newSession(t)
	s.getenv["SUMS_TOKEN"] = "secret"
	for _, line := range []string{
		"reward alpha --task testdata/sums --mode fork --retries 0 --snapshot task-1",
		"reward alpha --verifier sh:true --artifact /a* --work-tree /w --timeout 5s -u dev -w /w --score exit_code --mode transplant --policy-timed-out",
	} {
		if _, stderr, code := s.run(strings.Fields(line)...); code != 0 {
			t.Fatalf("%s: exit code %d: %s", line, code, stderr)
		}
	}
	got := s.node.vms[0].judged
	first := got[0]
	if first.Snapshot != "task-1" || first.Retries != -1 || first.Where != task.Fork || first.Task != "example/sums" || first.Timeout != time.Minute ||
		first.Dir != "/work" || !reflect.DeepEqual(first.Env, []string{"TOKEN=secret"}) || !strings.HasSuffix(first.Tests, "testdata/sums/tests") {
		t.Errorf("got %+v", first)
	}
	want := node.Judging{Request: judge.Request{Retries: judge.DefaultRetries, PolicyTimedOut: true, Verifier: judge.Verifier{
		Command: []string{"/bin/sh", "-c", "true"}, Timeout: 5 * time.Second, User: "dev", Dir: "/w", Judging: task.Judging{
			Where: task.Transplant, Score: task.ScoreExitCode, WorkTree: "/w", Artifacts: []task.Artifact{{Source: "/a*"}},
			ArtifactBytes: task.DefaultArtifactBytes, ArtifactEntries: task.DefaultArtifactEntries,
		},
	}}}
	if !reflect.DeepEqual(got[1], want) {
		t.Errorf("got  %+v\nwant %+v", got[1], want)
	}
}

func TestTaskVerifyBringsTheSolution(t *testing.T) {
	s := newSession(t)
	s.run("task", "verify", "testdata/sums", "--snapshot", "task-1", "-n", "4")
	got := s.node.tried
	if len(got) != 1 || got[0].Count != 4 || got[0].Snapshot != "task-1" || !strings.HasSuffix(got[0].Solution.Dir, "testdata/sums/solution") ||
		got[0].Solution.WorkDir != "/work" || got[0].Where != task.Both {
		t.Errorf("got %+v", got)
	}
}
