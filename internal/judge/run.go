package judge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/guest/task"
)

const (
	// patience is how long a guest may take for one step of ours.
	patience = 5 * time.Minute
	// quiesceTimeout is how long it may take until nothing of it runs, and
	// quiesceGrace how long processes have to end themselves.
	quiesceTimeout = 30 * time.Second
	quiesceGrace   = 500 * time.Millisecond
)

// place is a machine in which the verifier is going to run.
type place struct {
	Machine
	judge *judge
	// keep are the processes of the clean machine.
	keep []client.ProcessInfo
	// whose is the outcome of what goes wrong before the verifier begins and because
	// of what is in the guest.
	whose  Outcome
	result *Result
	// left is what was there when the verifier had ended.
	left client.Survey
}

// verify runs the verifier and reads its verdict. The result is the place's.
func (p *place) verify(ctx context.Context) {
	if p.prepare(ctx) && p.run(ctx) && p.settle(ctx) {
		p.score(ctx)
	}
	// What the host's storage refused may be why the verifier failed.
	if h := p.Health(ctx); h.Storage != nil && p.result.Outcome != InfraError {
		p.result.fail(InfraError, ReasonHostStorage, h.Storage.Error())
	}
}

// step bounds one step of ours.
func step(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, patience, fmt.Errorf("the guest did not answer within %v", patience))
}

// prepare brings the tests into the guest.
func (p *place) prepare(ctx context.Context) bool {
	ctx, cancel := step(ctx)
	defer cancel()
	empty := []client.EmptyDirectory{
		{Path: testsDir, Mode: 0o755},
		{Path: verdictDir, User: p.judge.User, Mode: 0o755},
		{Path: verifyHome, User: p.judge.User, Mode: 0o755},
	}
	var placed client.TreeStats
	var err error
	if p.judge.Tests == "" {
		_, err = p.Guest().Vacate(ctx, empty...)
	} else {
		placed, err = putTests(ctx, p.Guest(), p.judge.Tests, client.Placement{Dir: testsDir, Vacate: empty, Sum: true})
	}
	var ours *hostError
	switch {
	case errors.As(err, &ours):
		p.result.fail(InfraError, ReasonMachine, "read tests: "+err.Error())
	case answered(err) == proto.CodeNotVacated && p.whose == Tampering:
		p.result.fail(Tampering, ReasonNotCleared, err.Error())
	case err != nil:
		p.result.fault(ctx, p, p.whose, err)
	default:
		return p.check(ctx, placed.Sum, true)
	}
	return false
}

// check compares the tests in the guest, which have this sum, with those on the host.
func (p *place) check(ctx context.Context, sum string, exactly bool) bool {
	if p.judge.Tests == "" || sum == p.judge.testsSum {
		return true
	}
	// Too many for a sum, or not the same: what is it?
	r, w := io.Pipe()
	go func() {
		_, err := p.Guest().GetExactTree(ctx, testsDir, w)
		w.CloseWithError(err)
	}()
	err := p.judge.tests.check(r, exactly)
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	r.CloseWithError(io.ErrClosedPipe)
	switch {
	case err == nil:
		return true
	case isChanged(err):
		p.result.fail(Tampering, ReasonTestsChanged, err.Error())
	default:
		p.result.fault(ctx, p, p.whose, err)
	}
	return false
}

// command is the verifier's, with an environment of its own.
func (p *place) command() client.Command {
	c := client.Command{
		Args: p.judge.argv, User: p.judge.User, Dir: p.judge.Dir, ClearEnv: true, Timeout: p.judge.Timeout,
		Env: []string{
			"PATH=" + strings.Join(searchPath, ":"), "HOME=" + verifyHome, "LANG=C.UTF-8", "TERM=dumb",
		},
		StdoutLimit: outputLimit, StderrLimit: outputLimit,
	}
	if c.Dir == "" {
		c.Dir = "/"
	}
	for _, e := range p.judge.Env {
		name, _, _ := strings.Cut(e, "=")
		for i, have := range c.Env {
			if strings.HasPrefix(have, name+"=") {
				c.Env = append(c.Env[:i], c.Env[i+1:]...)
				break
			}
		}
		c.Env = append(c.Env, e)
	}
	return c
}

// run runs the verifier.
func (p *place) run(ctx context.Context) bool {
	c := p.command()
	stdout, stderr := newCapture(), newCapture()
	c.Stdout, c.Stderr = stdout, stderr
	// The guest's clock ends the verifier; this one is for a guest that is not there.
	limit := 3*c.Timeout + patience
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the guest did not end the verifier within %v", limit))
	defer cancel()
	start := time.Now()
	r, err := p.Guest().Exec(ctx, c)
	if err != nil {
		// From here on it is not the rollout's past alone that counts: the verifier, and
		// what it runs of the policy's, may have ended the guest.
		p.result.fault(ctx, p, VerifierError, err)
		return false
	}
	p.result.Run = &Run{
		ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, OOMKilled: r.OOMKilled,
		DurationMS: r.DurationMS, LastOutputMS: max(stdout.since(start), stderr.since(start)), PeakMemoryBytes: r.PeakMemoryBytes,
		Stdout: stdout.output(r.StdoutDropped), Stderr: stderr.output(r.StderrDropped),
	}
	if r.Error != nil {
		p.result.fail(VerifierError, ReasonNotInvoked, r.Error.Message)
		return false
	}
	return true
}

// settle ends what the verifier has left, so that nobody writes a verdict any more,
// and looks whether the tests are still the tests, and what it has written.
func (p *place) settle(ctx context.Context) bool {
	ctx, cancel := step(ctx)
	defer cancel()
	look := client.Look{Exact: p.verdicts()}
	if p.judge.Tests != "" {
		look.Tree = testsDir
	}
	q, err := p.Guest().Quiesce(ctx, client.Quiescence{
		Keep: p.keep, Halt: func(client.ProcessInfo) bool { return true }, Timeout: quiesceTimeout, Look: &look,
	})
	if err != nil {
		p.result.fault(ctx, p, VerifierError, err)
		return false
	}
	if !p.result.quiet(p.whose, q) {
		return false
	}
	p.left = *q.Survey
	return p.check(ctx, p.left.Sum, false)
}

// verdicts are the files that may have the verdict.
func (p *place) verdicts() []string {
	switch p.judge.Score {
	case task.ScoreExitCode:
		return nil
	case task.ScoreJUnit:
		return []string{p.judge.JUnit}
	}
	return []string{rewardJSON, rewardText}
}

// quiet reports whether nothing runs any more that is not to, and was surveyed then.
func (r *Result) quiet(whose Outcome, q client.Quieted) bool {
	switch {
	case len(q.Survivors) > 0 || q.Unsettled:
		r.fail(whose, ReasonSurvivors, survivors(q))
	case q.Survey == nil:
		r.fail(whose, ReasonGuestRefused, "the guest agent did not look at what it was asked for")
	default:
		return true
	}
	return false
}

func survivors(q client.Quieted) string {
	names := make([]string, len(q.Survivors))
	for i, s := range q.Survivors {
		names[i] = fmt.Sprintf("%s (%d)", s.Name, s.PID)
	}
	return "processes could not be ended: " + strings.Join(names, ", ")
}

// score says what the run came to.
func (p *place) score(ctx context.Context) {
	r := p.result.Run
	switch {
	case r.TimedOut:
		p.result.fail(VerifierTimeout, ReasonTimeout, fmt.Sprintf("the verifier did not end within %v", p.judge.Timeout))
		return
	case r.OOMKilled:
		p.result.fail(OOM, ReasonOOM, "the guest's kernel killed a process of the verifier for want of memory")
		return
	case r.Signal != 0:
		p.result.fail(VerifierError, ReasonSignal, fmt.Sprintf("signal %d ended the verifier", r.Signal))
		return
	}
	ctx, cancel := step(ctx)
	defer cancel()
	reward, rewards, err := p.read(ctx)
	if err == nil {
		p.result.Outcome, p.result.Reward, p.result.Rewards = Scored, &reward, rewards
		return
	}
	reason, isUnfit := reasonOf(err)
	switch {
	case !isUnfit:
		p.result.fault(ctx, p, VerifierError, err)
	case reason == ReasonMissing || reason == ReasonEmpty:
		p.result.fail(NoVerdict, reason, err.Error())
	default:
		p.result.fail(VerifierError, reason, err.Error())
	}
}

// read returns the number that the verifier gave. Nothing runs in the guest any more.
func (p *place) read(ctx context.Context) (float64, map[string]float64, error) {
	code := p.result.Run.ExitCode
	switch p.judge.Score {
	case task.ScoreExitCode:
		switch code {
		case 0:
			return 1, nil, nil
		case 1:
			return 0, nil, nil
		}
		return 0, nil, unfitf(ReasonExitCode, "exit code %d is neither 0 nor 1", code)
	case task.ScoreJUnit:
		return p.readReport(ctx, code)
	}
	if code != 0 {
		return 0, nil, unfitf(ReasonExitCode, "the verifier ended with exit code %d, whatever it has written", code)
	}
	b, err := p.file(ctx, rewardJSON, maxReward)
	if err != nil {
		return 0, nil, err
	}
	if b != nil {
		return parseRewardJSON(b)
	}
	if b, err = p.file(ctx, rewardText, maxReward); err != nil {
		return 0, nil, err
	}
	if b == nil {
		return 0, nil, unfitf(ReasonMissing, "the verifier wrote neither %s nor %s", rewardJSON, rewardText)
	}
	n, err := parseRewardText(b)
	return n, nil, err
}

// readReport reads a JUnit report. Test programs end with 1 if a test has failed.
func (p *place) readReport(ctx context.Context, code int) (float64, map[string]float64, error) {
	if code != 0 && code != 1 {
		return 0, nil, unfitf(ReasonExitCode, "exit code %d is neither 0 nor 1", code)
	}
	b, err := p.file(ctx, p.judge.JUnit, maxReport)
	if err != nil {
		return 0, nil, err
	}
	if b == nil {
		return 0, nil, unfitf(ReasonMissing, "the verifier wrote no %s", p.judge.JUnit)
	}
	counts, err := parseReport(bytes.NewReader(b))
	if err != nil {
		return 0, nil, err
	}
	n, err := counts.reward()
	if err == nil && n == 1 && code != 0 {
		err = unfitf(ReasonContradiction, "all tests of the report have passed, but the exit code is %d", code)
	}
	return n, map[string]float64{"passed": float64(counts.passed), "failed": float64(counts.failed), "skipped": float64(counts.skipped)}, err
}

// file reads a small regular file of those that settle has looked at, nil if it is not
// there.
func (p *place) file(ctx context.Context, path string, limit int64) ([]byte, error) {
	i := slices.IndexFunc(p.left.Files, func(f client.SurveyedFile) bool { return string(f.Path) == path })
	if i < 0 {
		return nil, nil
	}
	found := p.left.Files[i]
	switch {
	case found.Kind != proto.KindFile:
		return nil, unfitf(ReasonNotRegular, "%s is no regular file", path)
	case found.Size > limit:
		return nil, unfitf(ReasonTooLarge, "%s has %d bytes", path, found.Size)
	case found.Size == int64(len(found.Content)):
		return append([]byte{}, found.Content...), nil
	}
	var b bytes.Buffer
	if _, err := p.Guest().Get(ctx, path, &limitedWriter{&b, limit}); err != nil {
		if errors.Is(err, errLimit) {
			err = unfitf(ReasonTooLarge, "%s has more than %d bytes", path, limit)
		}
		return nil, err
	}
	return b.Bytes(), nil
}

var errLimit = errors.New("more bytes than allowed")

// limitedWriter refuses what goes beyond its limit.
type limitedWriter struct {
	w    io.Writer
	left int64
}

func (w *limitedWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > w.left {
		return 0, errLimit
	}
	w.left -= int64(len(p))
	return w.w.Write(p)
}

// programArgv is how a program of a directory is run that was copied into a guest: by
// itself, or if the host has lost its mode, by the interpreter that it names.
func programArgv(dir, program, guestDir string) ([]string, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.Open(program)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	path := guestDir + "/" + program
	if info.Mode()&0o111 != 0 {
		return []string{path}, nil
	}
	head := make([]byte, 256)
	n, err := io.ReadFull(f, head)
	if err != nil && err != io.ErrUnexpectedEOF && err != io.EOF {
		return nil, err
	}
	line, _, _ := strings.Cut(string(head[:n]), "\n")
	if interpreter, ok := strings.CutPrefix(line, "#!"); ok && len(strings.Fields(interpreter)) > 0 {
		return append(strings.Fields(interpreter), path), nil
	}
	return []string{"/bin/sh", path}, nil
}
