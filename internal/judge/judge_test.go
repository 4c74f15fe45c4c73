package judge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/guest/task"
	"github.com/forkvm/forkvm/internal/failure"
)

// request judges a working rollout.
func request(t *testing.T, where task.Where) Request {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "test.sh"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return Request{Task: "answer", Verifier: Verifier{Tests: dir, Timeout: time.Minute, Judging: task.Judging{
		Where: where, Score: task.ScoreReward, Artifacts: []task.Artifact{{Source: "/work"}}, ArtifactBytes: 1 << 20, ArtifactEntries: 100,
	}}}
}

func judgeIt(t *testing.T, m *fakeMachines, r Request) *Verdict {
	t.Helper()
	v, err := Judge(t.Context(), m, r)
	if err != nil {
		t.Fatal(err)
	}
	if open := m.leftOpen(); len(open) > 0 {
		t.Errorf("machines %v were left", open)
	}
	if (v.Reward != nil) != (v.Outcome == Scored) {
		t.Errorf("%s has the reward %v", v.Outcome, v.Reward)
	}
	return v
}

var ways = []task.Where{task.Fork, task.Transplant, task.Both}

func TestJudge(t *testing.T) {
	for _, where := range ways {
		m := working()
		v := judgeIt(t, m, request(t, where))
		check(t, string(where), v.Outcome, v.Reward, Scored, number(1))
		if (v.Fork != nil) != (where != task.Transplant) || (v.Transplant != nil) != (where != task.Fork) {
			t.Errorf("%s: results %+v", where, v)
		}
		m = working()
		delete(m.rollout, "/work/answer")
		v = judgeIt(t, m, request(t, where))
		check(t, string(where)+", nothing done", v.Outcome, v.Reward, Scored, number(0))
		if len(v.Retried) > 0 || v.VerifierHash == "" || v.Schema != Schema {
			t.Errorf("verdict %+v", v)
		}
	}
}

// The verifier's files come into a machine in which the policy has ended, and after
// places were made for them; the verdict is read when the verifier has ended, too.
func TestOrder(t *testing.T) {
	m := working()
	judgeIt(t, m, request(t, task.Fork))
	for _, machine := range m.made {
		if len(machine.guest.commands) == 0 {
			continue
		}
		got := strings.Join(machine.guest.calls, " ")
		want := "quiesce put_tree exec quiesce"
		if got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		c := machine.guest.commands[0]
		if !c.ClearEnv || !slices.Contains(c.Env, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") || c.Args[0] != "/tests/test.sh" || c.Dir != "/" {
			t.Errorf("command %+v", c)
		}
	}
}

// What a verifier can do, and what becomes of it. Only a proper 0 is 0.
func TestOutcomesOfTheVerifier(t *testing.T) {
	writes := func(name, content string) func(*fakeGuest) {
		return func(g *fakeGuest) { g.write(name, content) }
	}
	cases := []struct {
		name    string
		score   task.Score
		do      func(g *fakeGuest)
		result  client.Result
		outcome Outcome
		reason  Reason
		reward  *float64
	}{
		{"0", "", writes(rewardText, "0"), client.Result{}, Scored, "", number(0)},
		{"a half", "", writes(rewardText, " 0.5\n"), client.Result{}, Scored, "", number(0.5)},
		{"json", "", writes(rewardJSON, `{"reward": 0.25, "style": 7}`), client.Result{}, Scored, "", number(0.25)},
		{"json wins", "", func(g *fakeGuest) { g.write(rewardJSON, `{"reward":0}`); g.write(rewardText, "1") }, client.Result{}, Scored, "", number(0)},
		{"bad json beside text", "", func(g *fakeGuest) { g.write(rewardJSON, `{`); g.write(rewardText, "1") }, client.Result{}, VerifierError, ReasonMalformed, nil},
		{"nothing", "", func(*fakeGuest) {}, client.Result{}, NoVerdict, ReasonMissing, nil},
		{"empty", "", writes(rewardText, " \n"), client.Result{}, NoVerdict, ReasonEmpty, nil},
		{"empty json", "", writes(rewardJSON, ""), client.Result{}, NoVerdict, ReasonEmpty, nil},
		{"words", "", writes(rewardText, "yes"), client.Result{}, VerifierError, ReasonMalformed, nil},
		{"nan", "", writes(rewardText, "nan"), client.Result{}, VerifierError, ReasonNotFinite, nil},
		{"inf", "", writes(rewardText, "+Inf"), client.Result{}, VerifierError, ReasonNotFinite, nil},
		{"overflow", "", writes(rewardJSON, `{"reward":1e999}`), client.Result{}, VerifierError, ReasonNotFinite, nil},
		{"above", "", writes(rewardText, "1.5"), client.Result{}, VerifierError, ReasonOutOfRange, nil},
		{"below", "", writes(rewardJSON, `{"reward":-1}`), client.Result{}, VerifierError, ReasonOutOfRange, nil},
		{"huge", "", writes(rewardText, strings.Repeat(" ", maxReward)+"1"), client.Result{}, VerifierError, ReasonTooLarge, nil},
		{"a link", "", func(g *fakeGuest) { g.files[rewardJSON] = fakeFile{kind: client.KindLink, content: "/work/mine"} }, client.Result{}, VerifierError, ReasonNotRegular, nil},
		{"a directory", "", func(g *fakeGuest) { g.files[rewardText] = fakeFile{kind: client.KindDirectory} }, client.Result{}, VerifierError, ReasonNotRegular, nil},
		{"1 and then a failure", "", writes(rewardText, "1"), client.Result{ExitCode: 3}, VerifierError, ReasonExitCode, nil},
		{"crash before it writes", "", func(*fakeGuest) {}, client.Result{ExitCode: 1}, VerifierError, ReasonExitCode, nil},
		{"signal", "", writes(rewardText, "1"), client.Result{ExitCode: 139, Signal: 11}, VerifierError, ReasonSignal, nil},
		{"timeout", "", writes(rewardText, "1"), client.Result{ExitCode: 124, TimedOut: true, Signal: 9}, VerifierTimeout, ReasonTimeout, nil},
		{"out of memory", "", writes(rewardText, "0"), client.Result{OOMKilled: true}, OOM, ReasonOOM, nil},
		{"not found", "", func(*fakeGuest) {}, client.Result{ExitCode: 127, Error: &client.Error{Code: proto.CodeCommandNotFound}}, VerifierError, ReasonNotInvoked, nil},
		{"exit code 0", task.ScoreExitCode, func(*fakeGuest) {}, client.Result{}, Scored, "", number(1)},
		{"exit code 1", task.ScoreExitCode, func(*fakeGuest) {}, client.Result{ExitCode: 1}, Scored, "", number(0)},
		{"exit code 2", task.ScoreExitCode, func(*fakeGuest) {}, client.Result{ExitCode: 2}, VerifierError, ReasonExitCode, nil},
		{"report", task.ScoreJUnit, writes("/r.xml", `<testsuite><testcase/><testcase><skipped/></testcase></testsuite>`), client.Result{}, Scored, "", number(1)},
		{"failed test", task.ScoreJUnit, writes("/r.xml", `<testsuites><testsuite><testcase/><testcase><failure/></testcase></testsuite></testsuites>`), client.Result{ExitCode: 1}, Scored, "", number(0)},
		{"report against exit code", task.ScoreJUnit, writes("/r.xml", `<testsuite><testcase/></testsuite>`), client.Result{ExitCode: 1}, VerifierError, ReasonContradiction, nil},
		{"no tests", task.ScoreJUnit, writes("/r.xml", `<testsuite/>`), client.Result{}, NoVerdict, ReasonEmpty, nil},
		{"no report", task.ScoreJUnit, func(*fakeGuest) {}, client.Result{ExitCode: 1}, NoVerdict, ReasonMissing, nil},
		{"interrupted tests", task.ScoreJUnit, writes("/r.xml", `<testsuite><testcase/></testsuite>`), client.Result{ExitCode: 2}, VerifierError, ReasonExitCode, nil},
	}
	for _, where := range ways {
		for _, c := range cases {
			t.Run(string(where)+"/"+c.name, func(t *testing.T) {
				m := working()
				m.run = func(g *fakeGuest, _ client.Command) (client.Result, error) {
					c.do(g)
					return c.result, nil
				}
				r := request(t, where)
				if c.score != "" {
					r.Score = c.score
				}
				if c.score == task.ScoreJUnit {
					r.JUnit = "/r.xml"
				}
				v := judgeIt(t, m, r)
				check(t, c.name, v.Outcome, v.Reward, c.outcome, c.reward)
				if v.Reason != c.reason || len(v.Retried) > 0 {
					t.Errorf("reason %s (%s), %d retried", v.Reason, v.Detail, len(v.Retried))
				}
			})
		}
	}
}

// Failures of the machine are tried again, in machines of their own, and marked.
func TestFailuresOfTheMachine(t *testing.T) {
	killed := Health{Ended: "vm ended: killed"}
	cases := []struct {
		name   string
		break1 func(m *fakeMachine)
		reason Reason
	}{
		{"killed while the verifier ran", func(m *fakeMachine) {
			m.guest.run = func(*fakeGuest, client.Command) (client.Result, error) {
				m.end(killed)
				return client.Result{}, lost("exec")
			}
		}, ReasonMachine},
		{"killed before", func(m *fakeMachine) { m.end(killed); m.guest.errs["put_tree"] = lost("put_tree") }, ReasonMachine},
		{"killed behind", func(m *fakeMachine) {
			m.guest.run = func(g *fakeGuest, c client.Command) (client.Result, error) {
				m.end(killed)
				g.errs["quiesce"] = lost("quiesce")
				return judgeAnswer(g, c)
			}
		}, ReasonMachine},
		{"host's disk is full", func(m *fakeMachine) { m.end(Health{Storage: errors.New("no space")}) }, ReasonHostStorage},
		{"connection lost", func(m *fakeMachine) { m.guest.errs["put_tree"] = lost("put_tree") }, ReasonMachine},
	}
	for _, where := range ways {
		for _, c := range cases {
			for _, times := range []int{1, 2} {
				m := working()
				m.prepare = func(machine *fakeMachine, isFork bool, attempt int) {
					if attempt < times && isFork == (where != task.Transplant) {
						c.break1(machine)
					}
				}
				r, what := request(t, where), string(where)+"/"+c.name
				synctest.Test(t, func(t *testing.T) {
					v := judgeIt(t, m, r)
					if times == 1 {
						check(t, what, v.Outcome, v.Reward, Scored, number(1))
					} else if check(t, what, v.Outcome, v.Reward, InfraError, nil); v.Reason != c.reason {
						t.Errorf("%s: reason %s", what, v.Reason)
					}
					if len(v.Retried) != 1 {
						t.Errorf("%s: %d attempts before", what, len(v.Retried))
					}
				})
			}
		}
	}
}

func TestMachinesThatDoNotComeUp(t *testing.T) {
	hook := failure.New(failure.IdentityUnconfirmed, "hook /etc/forkvm/resume.d/evil failed")
	host := failure.New(failure.NoMemory, "no memory")
	cases := []struct {
		name         string
		forks, clean []error
		outcome      Outcome
		reward       *float64
		retried      int
	}{
		{"host, once", []error{host}, nil, Scored, number(1), 1},
		{"host", []error{host, host}, nil, InfraError, nil, 1},
		{"clean machine", nil, []error{errHost, errHost}, InfraError, nil, 1},
		{"rollout is gone", []error{failure.New(failure.VMNotRunning, "gone"), failure.New(failure.VMNotRunning, "gone")}, nil, InfraError, nil, 1},
		{"hook, once", []error{hook}, nil, Scored, number(1), 1},
		{"hook", []error{hook, hook}, nil, Tampering, nil, 1},
		{"guest ends itself", []error{&EndedError{Health{Ended: "shutdown", ByGuest: true}, errHost}, hook}, nil, Tampering, nil, 1},
		{"guest is ended", []error{&EndedError{Health{Ended: "killed"}, errHost}, &EndedError{Health{Ended: "killed"}, errHost}}, nil, InfraError, nil, 1},
		{"nothing comes up", []error{hook, hook}, []error{hook, hook}, InfraError, nil, 1},
	}
	for _, where := range ways {
		for _, c := range cases {
			m := working()
			m.forkErrs, m.cleanErrs = c.forks, c.clean
			v := judgeIt(t, m, request(t, where))
			check(t, string(where)+"/"+c.name, v.Outcome, v.Reward, c.outcome, c.reward)
			if len(v.Retried) != c.retried {
				t.Errorf("%s: retried %d times", c.name, len(v.Retried))
			}
		}
	}
}

// What a rollout can be found to have done. A transplant does not see most of it, and
// need not.
func TestTampering(t *testing.T) {
	file := func(path string, changed int64) client.SurveyedFile {
		return client.SurveyedFile{Path: proto.Text(path), Inode: 1, ChangedNS: changed}
	}
	cases := []struct {
		name       string
		prepare    func(m *fakeMachine, isFork bool)
		reason     Reason
		transplant *float64
	}{
		{"survivors", func(m *fakeMachine, isFork bool) {
			if isFork {
				m.guest.quiet = []client.Quieted{{Survivors: []client.ProcessInfo{{PID: 7, Name: "undead"}}}}
			}
		}, ReasonSurvivors, number(1)},
		{"places that cannot be cleared", func(m *fakeMachine, isFork bool) {
			if isFork {
				m.guest.errs["put_tree"] = refusal(proto.CodeNotVacated)
			}
		}, ReasonNotCleared, number(1)},
		{"changed shell", func(m *fakeMachine, isFork bool) {
			m.guest.survey.Files = []client.SurveyedFile{file("/bin/sh", map[bool]int64{false: 1, true: 2}[isFork])}
		}, ReasonToolchainChanged, number(1)},
		{"program before another", func(m *fakeMachine, isFork bool) {
			if isFork {
				m.guest.survey.Files = []client.SurveyedFile{file("/usr/local/bin/sh", 1)}
			}
		}, ReasonToolchainChanged, number(1)},
		{"program that is gone", func(m *fakeMachine, isFork bool) {
			if !isFork {
				m.guest.survey.Files = []client.SurveyedFile{file("/bin/sh", 1)}
			}
		}, ReasonToolchainChanged, number(1)},
		{"core pattern", func(m *fakeMachine, isFork bool) {
			f := file("/proc/sys/kernel/core_pattern", map[bool]int64{false: 1, true: 2}[isFork])
			if f.Content = []byte("core"); isFork {
				f.Content = []byte("|/evil")
			}
			m.guest.survey.Files = []client.SurveyedFile{f}
		}, ReasonToolchainChanged, number(1)},
		{"other guest agent", func(m *fakeMachine, isFork bool) {
			if isFork {
				m.guest.survey.Self.Start++
			}
		}, ReasonAgentReplaced, number(1)},
		{"guest that ends itself", func(m *fakeMachine, isFork bool) {
			if isFork {
				m.end(Health{Ended: "shutdown", ByGuest: true})
				m.guest.errs["quiesce"], m.guest.errs["get_tree"] = lost("quiesce"), lost("get_tree")
			}
		}, ReasonGuestEnded, nil},
	}
	for _, c := range cases {
		for _, where := range ways {
			m := working()
			m.prepare = func(m *fakeMachine, isFork bool, _ int) { c.prepare(m, isFork) }
			v := judgeIt(t, m, request(t, where))
			what := string(where) + "/" + c.name
			if where == task.Transplant && c.transplant != nil {
				check(t, what, v.Outcome, v.Reward, Scored, c.transplant)
				continue
			}
			check(t, what, v.Outcome, v.Reward, Tampering, nil)
			if v.Reason != c.reason {
				t.Errorf("%s: reason %s (%s)", what, v.Reason, v.Detail)
			}
		}
	}
}

// The same files are the same, whatever the kernel's say about times.
func TestSettingsOfTheKernelAreComparedByContent(t *testing.T) {
	m := working()
	m.prepare = func(m *fakeMachine, isFork bool, _ int) {
		m.guest.survey.Files = []client.SurveyedFile{{Path: "/proc/sys/kernel/core_pattern", ChangedNS: map[bool]int64{false: 1, true: 2}[isFork], Content: []byte("core")}}
	}
	v := judgeIt(t, m, request(t, task.Both))
	check(t, "same pattern", v.Outcome, v.Reward, Scored, number(1))
}

func TestTestsThatChange(t *testing.T) {
	for name, do := range map[string]func(g *fakeGuest){
		"changed": func(g *fakeGuest) { g.write("/tests/test.sh", "echo 1") },
		"gone":    func(g *fakeGuest) { delete(g.files, "/tests/test.sh") },
		"a link":  func(g *fakeGuest) { g.files["/tests/test.sh"] = fakeFile{kind: client.KindLink, content: "/work/x"} },
	} {
		m := working()
		m.run = func(g *fakeGuest, _ client.Command) (client.Result, error) {
			do(g)
			g.write(rewardText, "1")
			return client.Result{}, nil
		}
		v := judgeIt(t, m, request(t, task.Both))
		if check(t, name, v.Outcome, v.Reward, Tampering, nil); v.Reason != ReasonTestsChanged {
			t.Errorf("%s: %s", name, v.Reason)
		}
	}
	// What the tests leave beside themselves is nobody's business.
	m := working()
	m.run = func(g *fakeGuest, c client.Command) (client.Result, error) {
		g.write("/tests/cache", "x")
		return judgeAnswer(g, c)
	}
	v := judgeIt(t, m, request(t, task.Both))
	check(t, "cache", v.Outcome, v.Reward, Scored, number(1))
}

// An answer that is in no artifact, or a verifier that was deceived in the fork.
func TestDisagreement(t *testing.T) {
	m := working()
	r := request(t, task.Both)
	r.Artifacts = nil
	v := judgeIt(t, m, r)
	check(t, "undeclared artifact", v.Outcome, v.Reward, Disagreement, nil)
	check(t, "fork", v.Fork.Outcome, v.Fork.Reward, Scored, number(1))
	check(t, "transplant", v.Transplant.Outcome, v.Transplant.Reward, Scored, number(0))
	if v.Detail != "fork: scored 1; transplant: scored 0" {
		t.Errorf("detail %q", v.Detail)
	}
	m = working()
	m.prepare = func(m *fakeMachine, isFork bool, _ int) {
		if isFork {
			m.guest.run = func(*fakeGuest, client.Command) (client.Result, error) { return client.Result{TimedOut: true}, nil }
		}
	}
	v = judgeIt(t, m, request(t, task.Both))
	check(t, "timeout in the fork", v.Outcome, v.Reward, Disagreement, nil)
}

// A snapshot is looked at once for all who judge with it, and nothing but a survey that
// went well is remembered.
func TestBaselines(t *testing.T) {
	var b Baselines
	r := request(t, task.Both)
	r.Baselines, r.Rollout.SnapshotID = &b, "5a"
	m := working()
	m.prepare = func(m *fakeMachine, _ bool, attempt int) {
		if attempt == 0 {
			m.guest.errs["survey"] = lost("survey")
		}
	}
	for i, want := range []int{2, 2, 2, 3} {
		if i == 3 {
			r.Protect = []string{"/opt/checker"} // something else is looked at
		}
		v := judgeIt(t, m, r)
		check(t, "rollout", v.Outcome, v.Reward, Scored, number(1))
		if got := m.surveys(); got != want {
			t.Errorf("%d surveys after %d verdicts, want %d", got, i+1, want)
		}
	}
}

// Processes that share a directory look at a snapshot once, unless what is kept there is
// broken.
func TestBaselinesOfSeveralProcesses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "baselines")
	m := working()
	for i, want := range []int{1, 1, 2} {
		r := request(t, task.Both)
		r.Baselines, r.Rollout.SnapshotID = &Baselines{Dir: dir}, "5a"
		v := judgeIt(t, m, r)
		check(t, "rollout", v.Outcome, v.Reward, Scored, number(1))
		if got := m.surveys(); got != want {
			t.Errorf("%d surveys after %d verdicts, want %d", got, i+1, want)
		}
		files, err := os.ReadDir(dir)
		if err != nil || len(files) != 1 {
			t.Fatalf("%v in the directory, %v", files, err)
		}
		if i == 1 {
			if err := os.Truncate(filepath.Join(dir, files[0].Name()), 10); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// What is kept is bounded: the oldest go.
func TestBaselineFilesAreBounded(t *testing.T) {
	d := baselineFiles(t.TempDir())
	for i := range maxBaselines + 3 {
		key := baseline{byte(i), byte(i >> 8)}
		if err := d.keep(key, client.Survey{Sum: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
		made := time.Unix(int64(i), 0)
		if err := os.Chtimes(d.path(key), made, made); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range map[int]bool{0: false, 2: false, 3: true, maxBaselines + 2: true} {
		s, found := d.find(baseline{byte(i), byte(i >> 8)})
		if found != want || found && s.Sum != fmt.Sprint(i) {
			t.Errorf("survey %d: %v, %q", i, found, s.Sum)
		}
	}
}

// Whoever wants the verdict at once hears of it while the machines are still there.
func TestDecided(t *testing.T) {
	m := working()
	r := request(t, task.Both)
	var heard *Verdict
	r.Decided = func(v *Verdict) {
		if heard = v; len(m.leftOpen()) != 2 {
			t.Errorf("machines %v are there", m.leftOpen())
		}
	}
	if v := judgeIt(t, m, r); heard != v {
		t.Errorf("heard of %+v", heard)
	}
}

func TestPolicyTimeout(t *testing.T) {
	m := working()
	r := request(t, task.Both)
	r.PolicyTimedOut = true
	v := judgeIt(t, m, r)
	check(t, "policy", v.Outcome, v.Reward, PolicyTimeout, nil)
	if len(m.made) > 0 {
		t.Error("machines were made for nothing")
	}
}

func TestRetriesAreBounded(t *testing.T) {
	for retries, want := range map[int]int{-1: 0, 0: 1, 3: 3} {
		m := working()
		m.cleanErrs = slices.Repeat([]error{errHost}, 10)
		r := request(t, task.Both)
		r.Retries = retries
		if v := judgeIt(t, m, r); len(v.Retried) != want || v.Outcome != InfraError {
			t.Errorf("retries %d: %s after %d", retries, v.Outcome, len(v.Retried))
		}
	}
	// An old guest agent stays old.
	m := working()
	m.prepare = func(m *fakeMachine, _ bool, _ int) { m.guest.errs["survey"] = refusal(proto.CodeUnsupported) }
	if v := judgeIt(t, m, request(t, task.Fork)); v.Reason != ReasonUnsupported || len(v.Retried) > 0 {
		t.Errorf("got %+v", v)
	}
}

// What a clean machine has used is noted when the verifier has run in it, and of no other.
func TestNoteUse(t *testing.T) {
	for where, want := range map[task.Where]int{task.Both: 1, task.Transplant: 1, task.Fork: 0} {
		m := working()
		m.cleanErrs = []error{errors.New("no memory")} // tried again
		judgeIt(t, m, request(t, where))
		noted := 0
		for _, machine := range m.made {
			if machine.noted {
				noted++
				if !slices.ContainsFunc(machine.guest.calls, func(call string) bool { return strings.HasPrefix(call, "exec") }) {
					t.Errorf("%s: noted of a machine in which was done %q", where, machine.guest.calls)
				}
			}
		}
		if noted != want {
			t.Errorf("%s: noted of %d machines, want %d", where, noted, want)
		}
	}
}

// A caller that gives up gets no verdict, and nothing is left.
func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := working()
	m.run = func(*fakeGuest, client.Command) (client.Result, error) {
		cancel()
		return client.Result{}, lost("exec")
	}
	m.prepare = func(m *fakeMachine, _ bool, _ int) { m.end(Health{Ended: "killed"}) }
	v, err := Judge(ctx, m, request(t, task.Both))
	if v != nil || !errors.Is(err, context.Canceled) || len(m.leftOpen()) > 0 {
		t.Errorf("got %+v, %v, left %v", v, err, m.leftOpen())
	}
}

func TestRequestsThatMakeNoSense(t *testing.T) {
	for name, change := range map[string]func(*Request){
		"nothing to run": func(r *Request) { r.Tests = "" },
		"no directory":   func(r *Request) { r.Tests += "/none" },
		"no time":        func(r *Request) { r.Timeout = 0 },
		"no place":       func(r *Request) { r.Where = "" },
		"no score":       func(r *Request) { r.Score = "" },
		"no report":      func(r *Request) { r.Score = task.ScoreJUnit },
		"overlap":        func(r *Request) { r.WorkTree = "/work/tree" },
	} {
		r := request(t, task.Both)
		change(&r)
		if v, err := Judge(t.Context(), working(), r); err == nil {
			t.Errorf("%s: got %+v", name, v)
		}
	}
}

// The hash is of all that decides, and of nothing else.
func TestVerifierHash(t *testing.T) {
	hash := func(change func(r *Request)) string {
		r := request(t, task.Both)
		change(&r)
		j, err := newJudge(nil, r)
		if err != nil {
			t.Fatal(err)
		}
		return j.verdict.VerifierHash
	}
	same := func(*Request) {}
	if a, b := hash(same), hash(func(r *Request) { r.Task = "other"; r.Retries = 9; os.Chmod(r.Tests+"/test.sh", 0o700) }); a != b {
		t.Error("the same verifier has two hashes")
	}
	seen := map[string]string{hash(same): "original"}
	for name, change := range map[string]func(*Request){
		"content": func(r *Request) { os.WriteFile(r.Tests+"/test.sh", []byte("#!/bin/sh\n:\n"), 0o755) },
		"file":    func(r *Request) { os.WriteFile(r.Tests+"/more", nil, 0o644) },
		"mode":    func(r *Request) { os.Chmod(r.Tests+"/test.sh", 0o644) },
		"link":    func(r *Request) { os.Symlink("test.sh", r.Tests+"/link") },
		"timeout": func(r *Request) { r.Timeout++ },
		"env":     func(r *Request) { r.Env = []string{"A=b"} },
		"score":   func(r *Request) { r.Score = task.ScoreExitCode },
	} {
		h := hash(change)
		if other, twice := seen[h]; twice {
			t.Errorf("%s and %s have one hash", name, other)
		}
		seen[h] = name
	}
}

func TestParseSpec(t *testing.T) {
	dir := request(t, task.Both).Tests
	if v, err := ParseSpec(dir); err != nil || v.Tests != dir || v.Score != task.ScoreReward {
		t.Errorf("got %+v, %v", v, err)
	}
	if v, err := ParseSpec("sh:make check"); err != nil || v.Score != task.ScoreExitCode || v.Command[2] != "make check" {
		t.Errorf("got %+v, %v", v, err)
	}
	for _, bad := range []string{"sh:", "sh: ", dir + "/none", dir + "/test.sh", t.TempDir()} {
		if v, err := ParseSpec(bad); err == nil {
			t.Errorf("%q is %+v", bad, v)
		}
	}
}

func TestAgreement(t *testing.T) {
	scored := func(n float64) *Verdict { return &Verdict{Outcome: Scored, Reward: &n} }
	timeout := &Verdict{Outcome: VerifierTimeout}
	for _, c := range []struct {
		verdicts []*Verdict
		agreed   bool
		mean     *float64
	}{
		{[]*Verdict{scored(1), scored(1)}, true, number(1)},
		{[]*Verdict{scored(1), scored(0)}, false, number(0.5)},
		{[]*Verdict{scored(1), timeout}, false, number(1)},
		{[]*Verdict{timeout, timeout}, true, nil},
	} {
		a := Agree(c.verdicts)
		if a.Agreed != c.agreed || (a.Mean == nil) != (c.mean == nil) || a.Mean != nil && *a.Mean != *c.mean || a.Count != len(c.verdicts) {
			t.Errorf("got %+v", a)
		}
	}
}

// Whoever waits for verdicts has all of them before the machines are gone.
func TestRepeatTellsOfVerdictsThatAreDecided(t *testing.T) {
	told := make(chan []*Verdict, 1)
	heard := make(chan struct{})
	verdicts, err := Repeat(t.Context(), 3, func(all []*Verdict) {
		told <- all
		close(heard)
	}, func(_ context.Context, decided func(*Verdict)) (*Verdict, error) {
		v := &Verdict{Outcome: Scored}
		decided(v)
		<-heard
		return v, nil
	})
	if all := <-told; err != nil || !slices.Equal(all, verdicts) {
		t.Errorf("told of %v, returned %v, %v", all, verdicts, err)
	}
}

// fakeSubject is a rollout to try a task in.
type fakeSubject struct {
	*fakeMachine
	all *fakeMachines
}

func (s fakeSubject) Judge(ctx context.Context, r Request) (*Verdict, error) {
	s.all.mu.Lock()
	s.all.rollout = s.guest.files
	s.all.mu.Unlock()
	return Judge(ctx, s.all, r)
}

func TestTry(t *testing.T) {
	solution := Solution{Dir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(solution.Dir, "solve.sh"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	solves := func(answer string) func(*fakeGuest, client.Command) (client.Result, error) {
		return func(g *fakeGuest, _ client.Command) (client.Result, error) {
			if _, there := g.files["/solution/solve.sh"]; !there {
				return client.Result{ExitCode: 127}, nil
			}
			g.write("/work/answer", answer)
			return client.Result{}, nil
		}
	}
	var calls atomic.Int64
	cases := []struct {
		name    string
		solve   func(*fakeGuest, client.Command) (client.Result, error)
		verify  func(*fakeGuest, client.Command) (client.Result, error)
		problem string
	}{
		{"sound", solves("42\n"), judgeAnswer, ""},
		{"wrong solution", solves("41\n"), judgeAnswer, "not more than"},
		{"verifier that accepts all", solves("42\n"), func(g *fakeGuest, _ client.Command) (client.Result, error) {
			g.write(rewardText, "1")
			return client.Result{}, nil
		}, "not more than"},
		{"verifier that fails", solves("42\n"), func(*fakeGuest, client.Command) (client.Result, error) { return client.Result{ExitCode: 9}, nil }, "no number"},
		{"verifier that varies", solves("42\n"), func(g *fakeGuest, _ client.Command) (client.Result, error) {
			g.write(rewardText, []string{"0", "1"}[calls.Add(1)%2])
			return client.Result{}, nil
		}, "vary"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			start := func(context.Context) (Subject, error) {
				m := working()
				m.run = c.verify
				guest := &fakeGuest{files: map[string]fakeFile{"/work": {kind: client.KindDirectory}}, run: c.solve, errs: map[string]error{}}
				return fakeSubject{&fakeMachine{guest: guest}, m}, nil
			}
			r := request(t, task.Transplant)
			count := 2
			trial, err := Try(t.Context(), start, r, solution, count)
			if err != nil {
				t.Fatal(err)
			}
			if trial.Accepted != (c.problem == "") || !strings.Contains(strings.Join(trial.Problems, "\n"), c.problem) {
				t.Errorf("got %v %q", trial.Accepted, trial.Problems)
			}
			if len(trial.Solution.Verdicts) != count || len(trial.Empty.Verdicts) != count {
				t.Errorf("%d and %d verdicts", len(trial.Solution.Verdicts), len(trial.Empty.Verdicts))
			}
		})
	}
}
