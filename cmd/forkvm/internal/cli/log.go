package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
)

func (a *app) logVerbs() *cobra.Command {
	var verify bool
	var head string
	cmd := &cobra.Command{
		Use:   "log [flags] ROLLOUT [LINE]",
		Short: "Show what was done to a VM, also to one that is gone",
		Long: "Show what was done to a VM, line by line, also to one that is gone. With LINE, all\n" +
			"that is kept of one operation, its output included. -o jsonl prints the journal as\n" +
			"it is.",
		Example: "  forkvm log attempt-7\n  forkvm log attempt-7 12\n  forkvm log attempt-7 -o jsonl\n" +
			"  forkvm log attempt-7 --verify --head 77aa01c2…\n  forkvm log ls\n  forkvm log rm --older-than 168h",
		Args: upTo("ROLLOUT", "LINE"),
	}
	cmd.Flags().BoolVar(&verify, "verify", false, "check that nothing was changed, removed, added or moved; print the last line's number and hash")
	cmd.Flags().StringVar(&head, "head", "", "with --verify: the hash of a line that must be there, such as the last one that an earlier call printed")
	show := a.onNode(func(_ context.Context, n Node, args []string) error {
		if head != "" && !verify {
			return usagef("--head is for --verify")
		}
		r, err := n.FindRollout(args[0])
		if err != nil {
			return err
		}
		h, err := readHistory(r)
		switch {
		case err != nil:
			return err
		case verify && len(args) > 1:
			return usagef("--verify is about all lines")
		case verify:
			return a.verifyLog(n, r, h, head)
		case len(args) > 1:
			return a.showLine(r, h, args[1])
		}
		return a.showLog(h)
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return show(cmd, args)
	}
	cmd.AddCommand(a.logListVerb(), a.logRemoveVerb())
	return a.withOutput(cmd)
}

// logView is a journal as one document.
type logView struct {
	Schema  string            `json:"schema"`
	Rollout string            `json:"rollout"`
	Name    string            `json:"name"`
	Lines   []json.RawMessage `json:"lines"`
	// TornBytes are of an unfinished line at the end.
	TornBytes int64 `json:"torn_bytes,omitempty"`
}

// showLog prints what can be read, and then what cannot.
func (a *app) showLog(h *history) error {
	return errors.Join(a.writeLog(h), h.damage)
}

func (a *app) writeLog(h *history) error {
	switch a.format {
	case output.JSON:
		v := logView{Schema: "forkvm/log/v1", Rollout: h.id, Name: h.created.Name, Lines: []json.RawMessage{}, TornBytes: h.torn}
		for _, e := range h.lines {
			v.Lines = append(v.Lines, json.RawMessage(e.raw))
		}
		return output.WriteJSON(a.Stdout, v)
	case output.JSONL:
		for _, e := range h.lines {
			if _, err := a.Stdout.Write(e.raw); err != nil {
				return err
			}
		}
		return nil
	}
	l := output.List[pastEvent]{
		Header: []string{"LINE", "TIME", "EVENT", "WHAT", "RESULT"},
		Row: func(e pastEvent) []string {
			return []string{strconv.FormatUint(e.Seq, 10), h.clock(e.Line), e.Event, e.what(), e.result()}
		},
		Name: func(e pastEvent) string { return e.Hash },
	}
	for _, e := range h.lines {
		// What became of an operation stands beside it.
		if e.Event == journal.EventDone && e.done.Of != 0 && a.format == output.Table {
			continue
		}
		l.Items = append(l.Items, e)
	}
	if err := l.Write(a.Stdout, a.format); err != nil {
		return err
	}
	if h.torn > 0 {
		fmt.Fprintf(a.Stderr, "forkvm: %d bytes of an unfinished line are at the end of the journal\n", h.torn)
	}
	return nil
}

// clock is when a line was written: the first one's date, and how long after it.
func (h *history) clock(l *journal.Line) string {
	if l.Seq == 1 {
		return l.Time.UTC().Format(time.RFC3339)
	}
	return "+" + l.Time.Sub(h.began()).Round(time.Millisecond).String()
}

// verifyView is what checking a journal came to.
type verifyView struct {
	Schema  string `json:"schema"`
	Rollout string `json:"rollout"`
	Sound   bool   `json:"sound"`
	// Head is the last line that is sound.
	Head journal.Head `json:"head"`
	// KeptFiles is how many kept outputs were read and compared with their hashes.
	KeptFiles int   `json:"kept_files"`
	TornBytes int64 `json:"torn_bytes,omitempty"`
	// Origins are the rollouts that it grew from, nearest first.
	Origins []provenOrigin `json:"origins,omitempty"`
	Error   *failure.Error `json:"error,omitempty"`
}

// provenOrigin is a line of another rollout, as the one that began behind it has it.
type provenOrigin struct {
	journal.Origin
	// Proven: the line is there, and all before it is sound. Otherwise nothing is on
	// record of that rollout any more.
	Proven bool `json:"proven"`
}

// origins goes back through the rollouts that one grew from, as far as they are on
// record.
func (h *history) origins(n Node) (list []provenOrigin, err error) {
	seen := map[string]bool{h.id: true}
	for {
		from, known := h.created.Origin()
		if !known || seen[from.Rollout] {
			return list, nil
		}
		seen[from.Rollout] = true
		list = append(list, provenOrigin{Origin: from})
		r, err := n.FindRollout(from.Rollout)
		if failure.Is(err, failure.RolloutNotFound) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		origin, err := readHistory(r)
		if err != nil {
			return list, err
		}
		if e, missing := origin.at(from.Seq); missing != nil || e.Hash != from.Hash {
			return list, failure.New(failure.RecordDamaged,
				"rollout %s: it began behind line %d of rollout %s, which is not there with the hash %s any more", h.id, from.Seq, from.Rollout, from.Hash)
		}
		list[len(list)-1].Proven = true
		h = origin
	}
}

func (a *app) verifyLog(n Node, r Rollout, h *history, head string) error {
	kept, err := h.verify(r)
	var origins []provenOrigin
	if err == nil {
		origins, err = h.origins(n)
	}
	if err == nil && head != "" && !h.contains(head) {
		err = failure.New(failure.RecordDamaged, "rollout %s: no line has the hash %s: lines at the end are gone, or the journal was written anew", h.id, head)
	}
	v := verifyView{
		Schema: "forkvm/log-check/v1", Rollout: h.id, Sound: err == nil, Head: h.head, KeptFiles: kept, TornBytes: h.torn, Origins: origins,
	}
	if a.format.Machine() {
		if err != nil {
			v.Error = explain(err)
		}
		if err := output.WriteObject(a.Stdout, a.format, v); err != nil {
			return err
		}
		if !v.Sound {
			return exitCode(exitFailure)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if h.torn > 0 {
		fmt.Fprintf(a.Stderr, "forkvm: %d bytes of an unfinished line are at the end of the journal\n", h.torn)
	}
	for _, o := range origins {
		if !o.Proven {
			fmt.Fprintf(a.Stderr, "forkvm: nothing is on record of rollout %s, behind line %d of which it began\n", output.Visible(o.Rollout), o.Seq)
		}
	}
	_, err = fmt.Fprintf(a.Stdout, "%d %s\n", h.head.Seq, h.head.Hash)
	return err
}

// lineView is all that is kept of one line.
type lineView struct {
	Schema  string          `json:"schema"`
	Rollout string          `json:"rollout"`
	Line    json.RawMessage `json:"line"`
	Done    *journal.Done   `json:"done,omitempty"`
	Stdin   *textView       `json:"stdin,omitempty"`
	Stdout  *textView       `json:"stdout,omitempty"`
	Stderr  *textView       `json:"stderr,omitempty"`
}

// textView is what is kept of a stream.
type textView struct {
	Text   string `json:"text"`
	Base64 string `json:"base64,omitempty"`
}

// showLine prints one operation and what was written in it.
func (a *app) showLine(r Rollout, h *history, number string) error {
	seq, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return usagef("LINE %q is no number", number)
	}
	e, err := h.at(seq)
	if err != nil {
		return err
	}
	v := lineView{Schema: "forkvm/log-line/v1", Rollout: h.id, Line: e.raw, Done: e.done}
	var streams [3][]byte
	if e.done != nil {
		for i, s := range []struct {
			contents *journal.Contents
			to       **textView
		}{{e.done.Input, &v.Stdin}, {e.done.Stdout, &v.Stdout}, {e.done.Stderr, &v.Stderr}} {
			if s.contents == nil {
				continue
			}
			if streams[i], err = r.Kept(s.contents); err != nil {
				return damageOf(r, err)
			}
			t := new(textView)
			t.Text, t.Base64 = text(streams[i])
			*s.to = t
		}
	}
	if a.format.Machine() {
		return output.WriteObject(a.Stdout, a.format, v)
	}
	return a.printLine(h, e, streams)
}

func (a *app) printLine(h *history, e *pastEvent, streams [3][]byte) error {
	fmt.Fprintf(a.Stdout, "%d %s %s %s\n", e.Seq, h.clock(e.Line), e.Event, output.Visible(e.what()))
	if result := e.result(); result != "" {
		fmt.Fprintln(a.Stdout, output.Visible(result))
	}
	return a.visibly(a.Stdout, func(w io.Writer) error {
		for i, name := range []string{"input", "standard output", "standard error"} {
			if len(streams[i]) == 0 {
				continue
			}
			if _, err := fmt.Fprintf(w, "--- %s\n%s", name, streams[i]); err != nil {
				return err
			}
			if streams[i][len(streams[i])-1] != '\n' {
				fmt.Fprintln(w)
			}
		}
		return nil
	})
}

// rolloutView is one rollout in a list.
type rolloutView struct {
	Schema   string    `json:"schema"`
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	Created  time.Time `json:"created,omitzero"`
	Image    string    `json:"image,omitempty"`
	Snapshot string    `json:"snapshot,omitempty"`
	// Parent is the rollout that it grew from: it was forked from its VM, or began
	// from a snapshot of it. ParentLine is where in that one's journal.
	Parent     string `json:"parent,omitempty"`
	ParentLine uint64 `json:"parent_line,omitempty"`
	Task       string `json:"task,omitempty"`
	Lines      uint64 `json:"lines"`
	Operations int    `json:"operations"`
	Steps      int    `json:"steps"`
	// Ended is why the VM has ended, as far as it is on record; Removed: it is gone.
	Ended   string           `json:"ended,omitempty"`
	Removed bool             `json:"removed"`
	Verdict *journal.Verdict `json:"verdict,omitempty"`
	Error   *failure.Error   `json:"error,omitempty"`

	last time.Time
}

const rolloutSchema = "forkvm/rollout/v1"

// summarize is a rollout in short.
func summarize(r Rollout) rolloutView {
	v := rolloutView{Schema: rolloutSchema, ID: r.ID()}
	h, err := readHistory(r)
	if err == nil {
		err = h.damage
		v.sum(h)
	}
	if err != nil {
		v.Error = explain(err)
	}
	return v
}

func (v *rolloutView) sum(h *history) {
	c := h.created
	v.Name, v.Created, v.Image, v.Snapshot, v.Task = c.Name, h.began().UTC(), c.Image, c.Snapshot, c.Task
	v.Parent, v.ParentLine, v.Lines = c.Parent, c.ParentSeq, h.head.Seq
	for _, e := range h.lines {
		v.last = e.Time
		if e.op != nil {
			v.Operations++
			if e.done != nil && e.done.Step != "" {
				v.Steps++
			}
		}
		switch e.Event {
		case journal.EventEnded, journal.EventRemoved:
			var end journal.Ended
			if e.Decode(&end) == nil {
				v.Ended = end.Reason
			}
			v.Removed = v.Removed || e.Event == journal.EventRemoved
		case journal.EventVerdict:
			verdict := new(journal.Verdict)
			if e.Decode(verdict) == nil {
				v.Verdict = verdict
			}
		}
	}
}

func (a *app) logListVerb() *cobra.Command {
	return namesVerb(a, "List the rollouts of which there is a record", Node.Rollouts, summarize, a.rolloutList)
}

func (a *app) rolloutList(views []rolloutView) output.List[rolloutView] {
	now := a.Now()
	return output.List[rolloutView]{
		Header: []string{"ROLLOUT", "NAME", "FROM", "OPERATIONS", "STEPS", "VERDICT", "ENDED", "CREATED"},
		Row: func(v rolloutView) []string {
			if v.Error != nil && v.Lines == 0 {
				return []string{v.ID, "", "", "", "", "", "", string(v.Error.Code)}
			}
			created, verdict := output.Age(now.Sub(v.Created)), ""
			if v.Error != nil {
				created = string(v.Error.Code)
			}
			if v.Verdict != nil {
				verdict = describeVerdict(*v.Verdict)
			}
			return []string{
				v.ID, v.Name, originOf(journal.Created{Parent: v.Parent, Snapshot: v.Snapshot, Image: v.Image}),
				strconv.Itoa(v.Operations), strconv.Itoa(v.Steps), verdict, v.Ended, created,
			}
		},
		Name:  func(v rolloutView) string { return v.ID },
		Items: views,
	}
}

func (a *app) logRemoveVerb() *cobra.Command {
	var bounds recordBounds
	cmd := &cobra.Command{
		Use:   "rm [flags] [ROLLOUT...]",
		Short: "Remove records of VMs that are gone, with their steps",
		Long: "Remove records, with their steps: those that are named, or those of VMs that are gone and\n" +
			"beyond a bound. With two bounds what is beyond one of them goes.",
		Example: "  forkvm log rm attempt-7\n  forkvm log rm --older-than 168h\n  forkvm log rm --keep 1000",
		Args:    cobra.ArbitraryArgs,
	}
	f := cmd.Flags()
	f.DurationVar(&bounds.age, "older-than", 0, "those of all VMs that are gone and to which nothing was done for this long")
	f.IntVar(&bounds.count, "keep", 0, "those of all VMs that are gone but the so many to which something was done last")
	cmd.RunE = a.onNode(func(_ context.Context, n Node, refs []string) error {
		bounds.counted = f.Changed("keep")
		if (len(refs) == 0) == !bounds.given() || bounds.age < 0 || bounds.count < 0 {
			return usagef("a ROLLOUT is needed, or --older-than DURATION or --keep COUNT")
		}
		if bounds.given() {
			var err error
			if refs, err = a.beyond(n, bounds); err != nil {
				return err
			}
		}
		return a.each(refs, func(ref string) error {
			r, err := n.FindRollout(ref)
			if err == nil {
				err = r.Remove()
			}
			if err == nil {
				_, err = fmt.Fprintln(a.Stdout, ref)
			}
			return err
		})
	})
	return cmd
}

// recordBounds say which records of VMs that are gone are kept.
type recordBounds struct {
	age     time.Duration // 0: of any
	count   int
	counted bool // whether there is a count
}

func (b *recordBounds) given() bool { return b.age != 0 || b.counted }

// beyond are the records of VMs that are gone and that are not kept, the newest
// first.
func (a *app) beyond(n Node, bounds recordBounds) ([]string, error) {
	all, err := n.Rollouts()
	if err != nil {
		return nil, err
	}
	vms, err := n.List()
	if err != nil {
		return nil, err
	}
	there := map[string]bool{}
	for _, vm := range vms {
		there[vm.Record().ID] = true
	}
	var gone []rolloutView
	for _, r := range all {
		if !there[r.ID()] {
			gone = append(gone, summarize(r))
		}
	}
	slices.SortStableFunc(gone, func(a, b rolloutView) int { return b.last.Compare(a.last) })
	var refs []string
	for i, v := range gone {
		if bounds.age > 0 && a.Now().Sub(v.last) >= bounds.age || bounds.counted && i >= bounds.count {
			refs = append(refs, v.ID)
		}
	}
	return refs, nil
}
