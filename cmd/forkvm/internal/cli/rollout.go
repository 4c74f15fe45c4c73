package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
)

// history is a rollout's journal, read to its end or to where it is damaged.
type history struct {
	id      string
	created journal.Created
	lines   []pastEvent
	head    journal.Head
	torn    int64
	// damage is why lines ends before the journal does.
	damage error
}

// pastEvent is one line of a journal.
type pastEvent struct {
	*journal.Line
	raw []byte
	// Of an operation: what was asked and, once it is there, what became of it.
	op   *journal.Operation
	done *journal.Done
	// judged: the judging that began here has come to a verdict.
	judged bool
}

// readHistory reads a rollout's journal. The error is for one that cannot be read at
// all.
func readHistory(r Rollout) (*history, error) {
	f, err := r.Journal()
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := &history{id: r.ID()}
	for {
		l, err := f.Next()
		if err == io.EOF {
			break
		}
		if err == nil {
			err = h.add(l, f.Bytes())
		}
		if err != nil {
			h.damage = damageOf(r, err)
			break
		}
	}
	h.head, h.torn = f.Head(), f.Torn()
	return h, nil
}

func damageOf(r Rollout, err error) error {
	return failure.New(failure.RecordDamaged, "rollout %s: %w", r.ID(), err)
}

// add takes one line in.
func (h *history) add(l *journal.Line, raw []byte) error {
	e := pastEvent{Line: l, raw: raw}
	switch l.Event {
	case journal.EventCreated:
		if err := l.Decode(&h.created); err != nil {
			return err
		}
	case journal.EventDone:
		e.done = new(journal.Done)
		if err := l.Decode(e.done); err != nil {
			return err
		}
		// Lines are numbered from 1, without a gap.
		if of := e.done.Of; of > 0 && of < l.Seq {
			h.lines[of-1].done = e.done
		}
	case journal.EventVerdict:
		var v journal.Verdict
		if err := l.Decode(&v); err != nil {
			return err
		}
		if v.Of > 0 && v.Of < l.Seq {
			h.lines[v.Of-1].judged = true
		}
	default:
		if journal.IsOperation(l.Event) {
			e.op = new(journal.Operation)
			if err := l.Decode(e.op); err != nil {
				return err
			}
		}
	}
	h.lines = append(h.lines, e)
	return nil
}

// at returns the line with a number.
func (h *history) at(seq uint64) (*pastEvent, error) {
	if seq == 0 || seq > uint64(len(h.lines)) {
		return nil, failure.New(failure.InvalidArgument, "rollout %s has no line %d", h.id, seq)
	}
	return &h.lines[seq-1], nil
}

// began is when the rollout was created.
func (h *history) began() time.Time {
	if len(h.lines) == 0 {
		return time.Time{}
	}
	return h.lines[0].Time
}

// what says what a line is about, for people.
func (e *pastEvent) what() string {
	if e.op != nil {
		return describeOperation(e.Event, e.op)
	}
	text, err := describeEvent(e.Line)
	if err != nil {
		return string(e.Data)
	}
	return text
}

func describeOperation(event string, op *journal.Operation) string {
	switch event {
	case proto.OpExec:
		words := make([]string, len(op.Args))
		for i, arg := range op.Args {
			words[i] = quote(string(arg))
		}
		text := strings.Join(words, " ")
		if op.ID != "" {
			text += "  (" + op.ID + ")"
		}
		return text
	case proto.OpMove:
		return string(op.Path) + " to " + string(op.To)
	case proto.OpSignal:
		return fmt.Sprintf("%d to command %s", op.Signal, op.ID)
	case proto.OpConnect:
		return op.Network + " " + string(op.To)
	case proto.OpShutdown:
		return op.Action
	}
	return string(op.Path)
}

// quote is an argument as a shell would take it.
func quote(arg string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:,+@%^"
	if arg != "" && strings.Trim(arg, plain) == "" {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}

func describeEvent(l *journal.Line) (string, error) {
	switch l.Event {
	case journal.EventCreated:
		return decoded(l, func(c journal.Created) string { return c.Name + " from " + originOf(c) })
	case journal.EventForked:
		return decoded(l, func(f journal.Forked) string { return strings.Join(f.Children, " ") })
	case journal.EventReset:
		return decoded(l, func(r journal.Reset) string {
			if r.To == "" {
				return "to what it came from"
			}
			return "to " + r.To
		})
	case journal.EventSnapshot:
		return decoded(l, func(s journal.Snapshot) string { return s.Name })
	case journal.EventNetwork:
		return decoded(l, func(p policy.Policy) string {
			return strings.Join(policyWords(&p), " ")
		})
	case journal.EventRefused:
		return decoded(l, describeRefused)
	case journal.EventEnded, journal.EventRemoved:
		return decoded(l, func(e journal.Ended) string { return strings.TrimSuffix(e.Reason+": "+e.Detail, ": ") })
	case journal.EventJudging:
		return decoded(l, func(j journal.Judging) string { return strings.Join(strings.Fields(j.Task+" "+j.Step+" "+j.Mode), " ") })
	case journal.EventVerdict:
		return decoded(l, describeVerdict)
	case journal.EventRecovered:
		return decoded(l, func(r journal.Recovered) string {
			return fmt.Sprintf("%d bytes of an unfinished line were taken away", r.DroppedBytes)
		})
	case journal.EventPaused, journal.EventResumed:
		return "", nil
	}
	return string(l.Data), nil
}

func decoded[T any](l *journal.Line, describe func(T) string) (string, error) {
	var data T
	if err := l.Decode(&data); err != nil {
		return "", err
	}
	return describe(data), nil
}

func originOf(c journal.Created) string {
	switch {
	case c.Parent != "":
		return "vm " + c.Parent
	case c.Snapshot != "":
		return "snapshot " + c.Snapshot
	}
	return "image " + c.Image
}

func describeVerdict(v journal.Verdict) string {
	if v.Reward == nil {
		return v.Outcome
	}
	return v.Outcome + " " + number(v.Reward)
}

// result says what became of an operation, for people.
func (e *pastEvent) result() string {
	switch {
	case e.Event == journal.EventJudging && !e.judged:
		return "no verdict on record"
	case e.op == nil:
		return ""
	case e.done == nil:
		return "no end on record"
	}
	var parts []string
	if e.done.Error != "" {
		parts = append(parts, "failed: "+e.done.Error)
	}
	if r := e.done.Result; r != nil {
		parts = append(parts, describeResult(r))
	}
	for _, c := range []struct {
		name string
		*journal.Contents
	}{{"in", e.done.Input}, {"out", e.done.Stdout}, {"err", e.done.Stderr}} {
		if c.Contents != nil {
			parts = append(parts, c.name+" "+describeContents(c.Contents))
		}
	}
	if e.done.Step != "" {
		parts = append(parts, "step")
	}
	return strings.Join(parts, ", ")
}

func describeContents(c *journal.Contents) string {
	if c.Truncated {
		return output.Size(c.Bytes) + " (" + output.Size(c.KeptBytes) + " kept)"
	}
	return output.Size(c.Bytes)
}

func describeResult(r *journal.Result) string {
	text := fmt.Sprintf("exit %d", r.ExitCode)
	switch {
	case r.TimedOut:
		text = "timed out"
	case r.OOMKilled:
		text = "out of memory"
	case r.Error != "":
		text = r.Error
	case r.Signal != 0:
		text = fmt.Sprintf("signal %d", r.Signal)
	}
	return fmt.Sprintf("%s after %v", text, time.Duration(r.DurationMS)*time.Millisecond)
}

// contents are the kept contents of an operation that is done.
func (e *pastEvent) contents() []*journal.Contents {
	var all []*journal.Contents
	if e.Event == journal.EventDone {
		for _, c := range []*journal.Contents{e.done.Input, e.done.Stdout, e.done.Stderr} {
			if c != nil {
				all = append(all, c)
			}
		}
	}
	return all
}

// verify checks what the lines speak of, too, and says how much that was.
func (h *history) verify(r Rollout) (kept int, err error) {
	if h.damage != nil {
		return 0, h.damage
	}
	for i := range h.lines {
		for _, c := range h.lines[i].contents() {
			if c.File == "" {
				continue
			}
			kept++
			if _, missing := r.Kept(c); missing != nil {
				err = errors.Join(err, fmt.Errorf("line %d: %w", h.lines[i].Seq, missing))
			}
		}
	}
	if err != nil {
		return kept, damageOf(r, err)
	}
	return kept, nil
}

// contains says whether a line has this hash.
func (h *history) contains(hash string) bool {
	for i := range h.lines {
		if h.lines[i].Hash == hash {
			return true
		}
	}
	return false
}
