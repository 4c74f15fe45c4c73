package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/node"
)

// repeater does again in a VM what is on record of another one, in the order in
// which it was asked for.
type repeater struct {
	app     *app
	vm      VM
	rollout Rollout
	history *history
	env     []string
	files   *replayedFiles  // nil: they are not compared
	started map[string]bool // detached commands
}

// repeat does what a line says, and compares. It returns nil for a line that asks
// for nothing.
func (p *repeater) repeat(ctx context.Context, e *pastEvent) (*replayedLine, error) {
	l := &replayedLine{Schema: "forkvm/replayed-line/v1", Line: e.Seq, Event: e.Event, What: e.what()}
	var err error
	switch {
	case e.Event == journal.EventReset:
		err = p.reset(ctx, e)
	case e.Event == journal.EventDone && e.done.Of == 0:
		l.What = e.done.ID
		err = p.attach(ctx, e.done, l)
	case e.op == nil:
		return nil, nil
	case e.Event == proto.OpExec:
		err = p.exec(ctx, e, l)
	default:
		err = p.operate(ctx, e, l)
	}
	var answered *client.Error
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.As(err, &answered):
		l.compareError(e.done, answered)
	case err != nil:
		return nil, guestFailure(ctx, p.vm, err)
	case e.op != nil && e.done != nil && e.done.Error != "" && l.NotRepeated == "":
		l.differ("error", e.done.Error, "none")
	}
	if err := p.files.compare(ctx, l, e.done); err != nil {
		return nil, fmt.Errorf("compare files behind line %d: %w", e.Seq, err)
	}
	l.Same = l.NotRepeated == "" && len(l.Differences) == 0 && len(l.Files) == 0
	return l, nil
}

func (l *replayedLine) differ(what, recorded, replayed string) {
	if recorded != replayed {
		l.Differences = append(l.Differences, difference{what, recorded, replayed})
	}
}

// compareError compares what the guest agent refused with what it refused then.
func (l *replayedLine) compareError(done *journal.Done, now *client.Error) {
	switch {
	case done == nil || done.Error == "":
		l.differ("error", "none", now.Error())
	case !strings.Contains(done.Error, now.Message):
		l.differ("error", done.Error, now.Error())
	}
}

// reset puts the VM back to where the rollout's was put.
func (p *repeater) reset(ctx context.Context, e *pastEvent) error {
	var r journal.Reset
	if err := e.Decode(&r); err != nil {
		return err
	}
	if r.To == "" {
		r.To = p.history.created.Snapshot
	}
	_, err := p.vm.Reset(ctx, node.ResetOptions{To: r.To})
	return err
}

// operate repeats what is not a command.
func (p *repeater) operate(ctx context.Context, e *pastEvent, l *replayedLine) error {
	op, guest := e.op, p.vm.Guest()
	switch e.Event {
	case proto.OpPut:
		input, ok, err := p.input(e.done, l)
		if err != nil || !ok {
			return err
		}
		_, err = guest.Put(ctx, client.File{Path: string(op.Path), Mode: fileMode(op.Mode), User: op.User}, bytes.NewReader(input))
		return err
	case proto.OpPutTree:
		input, ok, err := p.input(e.done, l)
		if err != nil || !ok {
			return err
		}
		_, err = guest.PutTree(ctx, string(op.Path), bytes.NewReader(input), op.Owners)
		return err
	case proto.OpRemove:
		return guest.Remove(ctx, string(op.Path), op.Recursive)
	case proto.OpMove:
		return guest.Move(ctx, string(op.Path), string(op.To))
	case proto.OpSignal:
		_, err := guest.Signal(ctx, op.ID, op.Signal, op.All)
		return err
	case proto.OpConnect:
		l.NotRepeated = "what went over the connection is not on record"
	default:
		l.NotRepeated = "it is not repeated"
	}
	return nil
}

// fileMode is the form of a mode that the journal has in ours.
func fileMode(bits uint32) fs.FileMode {
	mode := fs.FileMode(bits & 0o777)
	for bit, special := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if bits&bit != 0 {
			mode |= special
		}
	}
	return mode
}

// input is what went in, if all of it is kept.
func (p *repeater) input(done *journal.Done, l *replayedLine) ([]byte, bool, error) {
	switch {
	case done == nil:
		l.NotRepeated = "its end is not on record, and so is not what went in"
		return nil, false, nil
	case done.Input == nil:
		return nil, true, nil
	case done.Input.Truncated:
		l.NotRepeated = fmt.Sprintf("only %s of the %s that went in are kept", output.Size(done.Input.KeptBytes), output.Size(done.Input.Bytes))
		return nil, false, nil
	}
	b, err := p.rollout.Kept(done.Input)
	if err != nil {
		return nil, false, damageOf(p.rollout, err)
	}
	return b, true, nil
}

// exec repeats a command.
func (p *repeater) exec(ctx context.Context, e *pastEvent, l *replayedLine) error {
	op := e.op
	if op.Terminal {
		l.NotRepeated = "it had a terminal"
		return nil
	}
	if op.ID != "" && p.started[op.ID] {
		return nil // a repeated call, which ran nothing
	}
	p.started[op.ID] = op.ID != ""
	c := client.Command{
		Args: proto.Strings(op.Args), Env: p.values(op.Env, l), ClearEnv: op.ClearEnv, Dir: string(op.Dir), User: op.User, Groups: op.Groups,
		Limits: op.Limits, Timeout: time.Duration(op.TimeoutMS) * time.Millisecond,
		StdoutLimit: op.StdoutLimit, StderrLimit: op.StderrLimit, OperationID: op.ID,
	}
	if op.Stdin {
		input, ok, err := p.input(e.done, l)
		if err != nil || !ok {
			return err
		}
		c.Stdin = bytes.NewReader(input)
	}
	if op.Detached && (e.done == nil || e.done.Result == nil) { // nobody waited there and then
		_, err := p.vm.Guest().Detach(ctx, c)
		return err
	}
	stdout, stderr := newDigest(), newDigest()
	if !op.StdoutDiscarded {
		c.Stdout = stdout
	}
	switch {
	case op.MergedStreams:
		c.Stderr = c.Stdout
	case !op.StderrDiscarded:
		c.Stderr = stderr
	}
	result, err := p.vm.Guest().Exec(ctx, c)
	if err != nil {
		return err
	}
	l.compare(e.done, &result, stdout, stderr)
	return nil
}

// values are the variables that the command had, as far as there is a value for them.
func (p *repeater) values(names []proto.Text, l *replayedLine) []string {
	given := map[string]string{}
	for _, e := range p.app.command(&commandFlags{env: p.env}, nil).Env {
		name, value, _ := strings.Cut(e, "=")
		given[name] = value
	}
	var env, missing []string
	for _, name := range proto.Strings(names) {
		if value, ok := given[name]; ok {
			env = append(env, name+"="+value)
		} else {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		l.NotRepeated = "it had variables whose values are not on record: " + strings.Join(missing, ", ") + "; give them with -e"
	}
	return env
}

// attach waits for a detached command whose end somebody had waited for.
func (p *repeater) attach(ctx context.Context, done *journal.Done, l *replayedLine) error {
	stdout, stderr := newDigest(), newDigest()
	d, err := p.vm.Guest().Attach(ctx, done.ID, client.Attachment{Stdout: stdout, Stderr: stderr})
	if err != nil || d.Result == nil {
		return err
	}
	l.compare(done, d.Result, stdout, stderr)
	return nil
}

// compare compares how a command ended with how it ended then.
func (l *replayedLine) compare(done *journal.Done, now *client.Result, stdout, stderr *digest) {
	replayed := node.ResultOf(now)
	l.Replayed = replayed
	if done == nil || done.Result == nil {
		l.NotRepeated = "its end is not on record"
		return
	}
	then := done.Result
	l.Recorded = then
	l.differ("exit code", fmt.Sprint(then.ExitCode), fmt.Sprint(replayed.ExitCode))
	l.differ("signal", fmt.Sprint(then.Signal), fmt.Sprint(replayed.Signal))
	l.differ("timed out", fmt.Sprint(then.TimedOut), fmt.Sprint(replayed.TimedOut))
	l.differ("out of memory", fmt.Sprint(then.OOMKilled), fmt.Sprint(replayed.OOMKilled))
	l.differ("error", orNone(then.Error), orNone(replayed.Error))
	l.differ("standard output cut by", bytesOf(then.StdoutDropped), bytesOf(replayed.StdoutDropped))
	l.differ("standard error cut by", bytesOf(then.StderrDropped), bytesOf(replayed.StderrDropped))
	l.differ("standard output", describeDigest(done.Stdout), stdout.String())
	l.differ("standard error", describeDigest(done.Stderr), stderr.String())
}

func bytesOf(n int64) string { return fmt.Sprintf("%d bytes", n) }

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// digest says what went by: its size and its hash.
type digest struct {
	hash  hash.Hash
	bytes int64
}

func newDigest() *digest { return &digest{hash: sha256.New()} }

func (d *digest) Write(p []byte) (int, error) {
	d.bytes += int64(len(p))
	return d.hash.Write(p)
}

func (d *digest) String() string { return digestText(d.bytes, hex.EncodeToString(d.hash.Sum(nil))) }

// describeDigest is the same of recorded contents; of none, nothing went by.
func describeDigest(c *journal.Contents) string {
	if c == nil {
		return newDigest().String()
	}
	return digestText(c.Bytes, c.SHA256)
}

func digestText(bytes int64, sum string) string { return fmt.Sprintf("%d bytes %s", bytes, sum) }
