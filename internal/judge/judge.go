package judge

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/tree"
	"github.com/forkvm/forkvm/guest/task"
)

// Request says what is judged, and how.
type Request struct {
	Verifier
	// Task and Step are names for the verdict.
	Task, Step string
	Rollout    Rollout
	// PolicyTimedOut: the policy has not ended in its time. Nothing is judged then.
	PolicyTimedOut bool
	// Retries is how often judging is tried again after an infra_error; negative:
	// never, 0: DefaultRetries.
	Retries int
	// Baselines, if set, remember what the task's snapshot is like. Otherwise each
	// judgement finds that out.
	Baselines *Baselines
	// Decided, if set, is called with the verdict as soon as that is final, while the
	// machines in which was judged are still there. Judge returns when they are gone.
	Decided func(*Verdict)
}

// DefaultRetries is how often a machine may fail.
const DefaultRetries = 1

// judge is a request that was found sound.
type judge struct {
	Request
	machines Machines
	tests    manifest
	testsSum string
	argv     []string
	verdict  *Verdict
}

// Judge gives a verdict on a rollout. The error is for requests that make no sense,
// and for a context that has ended: there is no verdict then.
func Judge(ctx context.Context, m Machines, r Request) (*Verdict, error) {
	j, err := newJudge(m, r)
	if err != nil {
		return nil, err
	}
	v := j.verdict
	if r.PolicyTimedOut {
		v.Outcome, v.Reason, v.Detail = PolicyTimeout, ReasonTimeout, "the policy has not ended in its time"
		if r.Decided != nil {
			r.Decided(v)
		}
		return v, nil
	}
	retries := r.Retries
	if retries == 0 {
		retries = DefaultRetries
	}
	for {
		a := j.attempt(ctx)
		if ctx.Err() != nil {
			a.close()
			return nil, fmt.Errorf("judge: %w", context.Cause(ctx))
		}
		v.decide()
		if v.Outcome != InfraError || v.Reason == ReasonUnsupported || len(v.Retried) >= max(retries, 0) {
			v.blame()
			v.DurationMS = time.Since(v.Started).Milliseconds()
			if r.Decided != nil {
				r.Decided(v)
			}
			a.close()
			return v, nil
		}
		a.close()
		v.Retried = append(v.Retried, Attempt{Fork: v.Fork, Transplant: v.Transplant})
	}
}

func newJudge(m Machines, r Request) (*judge, error) {
	if err := r.Check(); err != nil {
		return nil, fmt.Errorf("judge: %w", err)
	}
	tests, err := readTests(r.Tests)
	if err != nil {
		return nil, fmt.Errorf("judge: %w", err)
	}
	j := &judge{Request: r, machines: m, tests: tests, testsSum: tree.Sum(tests), argv: r.Command}
	if len(j.argv) == 0 {
		if j.argv, err = programArgv(r.Tests, task.TestProgram, testsDir); err != nil {
			return nil, fmt.Errorf("judge: %w", err)
		}
	}
	j.verdict = &Verdict{Schema: Schema, ID: newID(), Task: r.Task, Step: r.Step, Mode: r.Where, Rollout: r.Rollout, Started: time.Now().UTC()}
	j.verdict.VerifierHash, err = r.hash(j.testsSum)
	return j, err
}

func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// blame turns forks that never come up, for a reason that is in the guest, while
// clean machines do, into what they are.
func (v *Verdict) blame() {
	if v.Outcome != InfraError || v.Reason != ReasonForkFails {
		return
	}
	for _, r := range []*Result{v.Fork, v.Transplant} {
		if r != nil && r.Reason == ReasonForkFails {
			r.Outcome = Tampering
		}
	}
	v.decide()
}

// attempt judges once, in machines of its own, which the caller closes.
func (j *judge) attempt(ctx context.Context) *attempt {
	a := &attempt{judge: j, begun: time.Now()}
	v := j.verdict
	v.Phases, v.Fork, v.Transplant = nil, nil, nil
	if j.Where != task.Transplant {
		v.Fork = &Result{}
	}
	if j.Where != task.Fork {
		v.Transplant = &Result{}
	}
	a.judge1(ctx, v.Fork, v.Transplant)
	return a
}

// attempt is the machines of one.
type attempt struct {
	*judge
	fork, clean       Machine
	forkErr, cleanErr error
	survey            client.Survey // of the clean machine
	begun             time.Time     // when the phase that is on began
}

// end closes a phase of the attempt.
func (a *attempt) end(phase string) {
	now := time.Now()
	a.verdict.Phases = append(a.verdict.Phases, Phase{phase, float64(now.Sub(a.begun)) / float64(time.Millisecond)})
	a.begun = now
}

func (a *attempt) close() {
	if r := a.verdict.Transplant; r != nil && r.Run != nil {
		a.clean.NoteUse()
	}
	var all sync.WaitGroup
	for _, m := range []Machine{a.fork, a.clean} {
		if m != nil {
			all.Go(func() { _ = m.Close() }) // the verdict stands
		}
	}
	all.Wait()
}

// judge1 judges in the ways whose result is not nil.
func (a *attempt) judge1(ctx context.Context, fork, transplant *Result) {
	both := []*Result{fork, transplant}
	if !a.make(ctx, both) {
		return
	}
	survey, err := a.baseline(ctx)
	if err != nil {
		failBoth(both, func(r *Result) { r.fault(ctx, a.clean, InfraError, err) })
		return
	}
	a.survey = survey
	a.end("survey")
	if fork != nil {
		fork.Machine = a.fork.ID()
		a.quiesce(ctx, fork)
		a.end("quiesce")
	}
	if transplant != nil {
		transplant.Machine = a.clean.ID()
		a.transplant(ctx, transplant)
		a.end("transplant")
	}
	var runs sync.WaitGroup
	for _, p := range []*place{
		{Machine: a.fork, judge: a.judge, keep: survey.Processes, whose: Tampering, result: fork},
		{Machine: a.clean, judge: a.judge, keep: survey.Processes, whose: VerifierError, result: transplant},
	} {
		if p.result != nil && p.result.Outcome == "" {
			runs.Go(func() { p.verify(ctx) })
		}
	}
	runs.Wait()
	a.end("verify")
}

// baseline is what the clean machine is like.
func (a *attempt) baseline(ctx context.Context) (client.Survey, error) {
	look := a.guarded()
	look.Processes = true
	key, remembered := a.Baselines.of(a.Rollout.SnapshotID, look)
	if remembered {
		if s, ok := a.Baselines.find(key); ok {
			return s, nil
		}
	}
	s, err := a.clean.Guest().Survey(ctx, look)
	if err == nil && remembered {
		a.Baselines.keep(key, s)
	}
	return s, err
}

func failBoth(results []*Result, fail func(*Result)) {
	for _, r := range results {
		if r != nil {
			fail(r)
		}
	}
}

// make makes the machines.
func (a *attempt) make(ctx context.Context, results []*Result) bool {
	var made sync.WaitGroup
	made.Go(func() { a.fork, a.forkErr = a.machines.Fork(ctx) })
	made.Go(func() { a.clean, a.cleanErr = a.machines.Clean(ctx) })
	made.Wait()
	a.end("machines")
	switch {
	case a.cleanErr != nil:
		failBoth(results, func(r *Result) {
			r.fail(InfraError, ReasonMachine, "no machine of the task's snapshot: "+a.cleanErr.Error())
		})
		return false
	case a.forkErr != nil:
		reason := ReasonMachine
		if byGuest(a.forkErr) {
			reason = ReasonForkFails
		}
		failBoth(results, func(r *Result) { r.fail(InfraError, reason, "no fork of the rollout: "+a.forkErr.Error()) })
		return false
	}
	return true
}

// quiesce ends the policy in the fork, and looks whether what the verifier is going to
// use is what it was.
func (a *attempt) quiesce(ctx context.Context, r *Result) {
	ctx, cancel := step(ctx)
	defer cancel()
	look := a.guarded()
	q, err := a.fork.Guest().Quiesce(ctx, client.Quiescence{
		Keep: a.survey.Processes, Halt: halts, Grace: quiesceGrace, Timeout: quiesceTimeout, Look: &look,
	})
	if err != nil {
		r.fault(ctx, a.fork, Tampering, err)
		return
	}
	r.Ended, r.EndedProcesses = q.Ended, q.Processes
	if !r.quiet(Tampering, q) {
		return
	}
	survey := *q.Survey
	if !sameProcess(survey.Self, a.survey.Self) {
		r.fail(Tampering, ReasonAgentReplaced, fmt.Sprintf("the guest agent is process %d, started at %d, and not %d, %d",
			survey.Self.PID, survey.Self.Start, a.survey.Self.PID, a.survey.Self.Start))
		return
	}
	if r.Changed = differences(a.survey, survey); len(r.Changed) > 0 {
		r.fail(Tampering, ReasonToolchainChanged, fmt.Sprintf("%d files that the verifier may use are not what they were, %s first", len(r.Changed), r.Changed[0]))
	}
}

// transplant copies the artifacts into the clean machine.
func (a *attempt) transplant(ctx context.Context, r *Result) {
	ctx, cancel := context.WithTimeoutCause(ctx, 4*patience, errors.New("the artifacts were not copied in time"))
	defer cancel()
	t := &transplanter{from: a.fork.Guest(), to: a.clean.Guest(), limits: &sieve{entries: a.ArtifactEntries, bytes: a.ArtifactBytes}}
	err := t.transplant(ctx, &a.Verifier)
	r.Artifacts = &t.done
	var source *sourceError
	switch {
	case err == nil:
	case errors.Is(err, errTooMuch):
		r.fail(VerifierError, ReasonArtifactsTooLarge, fmt.Sprintf("%v: %d bytes in %d entries are allowed", err, a.ArtifactBytes, a.ArtifactEntries))
	case errors.Is(err, errNoArchive):
		r.fail(Tampering, ReasonArtifacts, err.Error())
	case errors.As(err, &source):
		r.fault(ctx, a.fork, Tampering, err)
	default:
		r.fault(ctx, a.clean, VerifierError, err)
	}
}
