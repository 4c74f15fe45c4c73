package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
)

// replayFlags say what of a rollout is repeated, and how.
type replayFlags struct {
	from         string
	until        uint64
	env          []string
	noFiles      bool
	ignore       []string
	readyTimeout time.Duration
}

func (a *app) replayVerb() *cobra.Command {
	var flags replayFlags
	cmd := &cobra.Command{
		Use:   "replay [flags] ROLLOUT",
		Short: "Do again what was done to a VM, and say what came out differently",
		Long: "Make a VM of a step of a rollout, do in it again what is on record from there on, and\n" +
			"say where exit codes or output differ, and files where the rollout has steps. The VM is\n" +
			"removed at the end. The exit code is 1 when something differs or could not be repeated.",
		Example: "  forkvm replay attempt-7\n  forkvm replay attempt-7 --from 12\n  forkvm replay attempt-7 -e TOKEN --ignore /var/log -o json",
		Args:    needs("ROLLOUT"),
	}
	f := cmd.Flags()
	f.StringVar(&flags.from, "from", "1", "the step to begin at: the line that it stands behind, or ROLLOUT@LINE; 1 is what the rollout began from")
	f.Uint64Var(&flags.until, "until", 0, "the last line to repeat; 0 is the end")
	f.StringArrayVarP(&flags.env, "env", "e", nil, "set NAME=VALUE, or NAME from this environment, for commands that had a variable of that name")
	f.BoolVar(&flags.noFiles, "no-files", false, "do not compare files with those of the rollout's steps")
	f.StringArrayVar(&flags.ignore, "ignore", nil, "files or directories that are not compared, an absolute path or pattern; may be repeated")
	f.DurationVar(&flags.readyTimeout, "ready-timeout", node.DefaultReadyTimeout, "how long to wait for the guest agent")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if err := checkPatterns(flags.ignore); err != nil {
			return err
		}
		r, err := n.FindRollout(args[0])
		if err != nil {
			return err
		}
		h, err := readHistory(r)
		if err == nil {
			err = h.damage
		}
		if err != nil {
			return err
		}
		return a.replay(ctx, n, r, h, &flags)
	})
	return a.withOutput(cmd)
}

// replayView is what came of repeating a rollout.
type replayView struct {
	Schema  string `json:"schema"`
	Rollout string `json:"rollout"`
	From    uint64 `json:"from"`
	// Same: everything was repeated, and nothing differs.
	Same bool `json:"same"`
	// Lines are the operations that were to be repeated.
	Lines []replayedLine `json:"lines"`
}

// replayedLine is one operation that was to be repeated.
type replayedLine struct {
	Schema string `json:"schema"`
	Line   uint64 `json:"line"`
	Event  string `json:"event"`
	What   string `json:"what"`
	Same   bool   `json:"same"`
	// NotRepeated is why it could not be, or not as it was.
	NotRepeated string          `json:"not_repeated,omitempty"`
	Differences []difference    `json:"differences,omitempty"`
	Recorded    *journal.Result `json:"recorded,omitempty"`
	Replayed    *journal.Result `json:"replayed,omitempty"`
	// FilesCompared: there is a step behind the line, and Files are those that came out
	// differently by it: added, removed or changed in the replay. Of Unsettled files it
	// is not known how they were.
	FilesCompared bool         `json:"files_compared,omitempty"`
	Files         []fileChange `json:"files,omitempty"`
	Unsettled     []string     `json:"unsettled,omitempty"`
}

// difference is something that came out differently.
type difference struct {
	What     string `json:"what"`
	Recorded string `json:"recorded"`
	Replayed string `json:"replayed"`
}

func (a *app) replay(ctx context.Context, n Node, r Rollout, h *history, flags *replayFlags) error {
	from, err := flags.begin(n, r)
	if err != nil {
		return err
	}
	if _, err := h.at(from); err != nil {
		return err
	}
	vm, err := flags.start(ctx, n, h, from)
	if err != nil {
		return err
	}
	v := replayView{Schema: "forkvm/replay/v1", Rollout: h.id, From: from, Same: true, Lines: []replayedLine{}}
	p := &repeater{app: a, vm: vm, rollout: r, history: h, env: flags.env, started: map[string]bool{}}
	if !flags.noFiles {
		p.files = &replayedFiles{node: n, vm: vm, ignore: flags.ignore, seen: map[string]filePair{}}
	}
	err = a.whileItLives(ctx, vm, true, func(ctx context.Context, _ VM) error {
		return a.spin("repeating", func() error {
			for i := range h.lines[from:] {
				e := &h.lines[from:][i]
				if flags.until > 0 && e.Seq > flags.until {
					break
				}
				l, err := p.repeat(ctx, e)
				if err != nil {
					return err
				}
				if l != nil {
					v.Lines, v.Same = append(v.Lines, *l), v.Same && l.Same
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	return a.showReplay(v)
}

// begin is the line behind which the replay begins.
func (f *replayFlags) begin(n Node, r Rollout) (uint64, error) {
	line := f.from
	if of, number, found := strings.Cut(f.from, "@"); found {
		other, err := n.FindRollout(of)
		if err != nil {
			return 0, err
		}
		if other.ID() != r.ID() {
			return 0, failure.New(failure.InvalidArgument, "step %s is not one of rollout %s", f.from, r.ID())
		}
		line = number
	}
	seq, err := strconv.ParseUint(line, 10, 64)
	if err != nil || seq == 0 {
		return 0, usagef("--from %q: a line of the rollout is needed, or ROLLOUT@LINE", f.from)
	}
	return seq, nil
}

// start makes the VM, from a step or from what the rollout began from.
func (f *replayFlags) start(ctx context.Context, n Node, h *history, from uint64) (VM, error) {
	c := h.created
	o := node.Options{ReadyTimeout: f.readyTimeout, Attached: true, Passing: true, Recording: node.RecordNone, Time: machine.Time(c.Time)}
	if from == 1 && c.Snapshot == "" && c.Parent == "" {
		o.CPUs, o.MemoryBytes, o.CommandLine = c.CPUs, c.MemoryBytes, c.KernelArgs
		return n.Boot(ctx, c.Image, o)
	}
	if from == 1 && c.Parent != "" {
		return nil, failure.New(failure.InvalidArgument, "rollout %s began as a fork, of which there is no snapshot: begin at a step, with --from", h.id)
	}
	return n.Restore(ctx, fmt.Sprintf("%s@%d", h.id, from), o)
}

// showReplay prints what came of it, and ends with 1 if it is not the same.
func (a *app) showReplay(v replayView) error {
	var err error
	if a.format == output.JSON {
		err = output.WriteJSON(a.Stdout, v)
	} else {
		l := output.List[replayedLine]{
			Header: []string{"LINE", "EVENT", "WHAT", "RESULT"},
			Row: func(l replayedLine) []string {
				return []string{strconv.FormatUint(l.Line, 10), l.Event, l.What, l.verdict()}
			},
			Name:  func(l replayedLine) string { return strconv.FormatUint(l.Line, 10) },
			Items: v.Lines,
		}
		err = l.Write(a.Stdout, a.format)
	}
	if !v.Same {
		err = errors.Join(err, exitCode(exitFailure))
	}
	return err
}

func (l *replayedLine) verdict() string {
	if l.Same {
		return "same"
	}
	var parts []string
	if l.NotRepeated != "" {
		parts = append(parts, l.NotRepeated)
	}
	for _, d := range l.Differences {
		parts = append(parts, fmt.Sprintf("%s: %.24s, was %.24s", d.What, d.Replayed, d.Recorded))
	}
	if len(l.Files) > 0 {
		parts = append(parts, describeFiles(l.Files))
	}
	return strings.Join(parts, "; ")
}
