package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
)

// stateDiff says how what programs see in one guest differs from what they see in
// another.
type stateDiff struct {
	Files     []fileChange `json:"files"`
	Processes processDiff  `json:"processes"`
	// Unsettled are files that changed while they were looked at: in a copy of the
	// state programs go on. Unread are directories that could not be read.
	Unsettled []string `json:"unsettled,omitempty"`
	Unread    []string `json:"unread,omitempty"`
}

// fileChange is one file that differs.
type fileChange struct {
	Path   string `json:"path"`
	Change string `json:"change"` // added, removed or changed
	Kind   string `json:"kind"`
	// What of a changed file: contents, kind, mode, owner, target, device.
	What       []string `json:"what,omitempty"`
	SizeBefore *int64   `json:"size_before,omitempty"`
	Size       *int64   `json:"size,omitempty"`
	// Diff is the difference of two texts, where it was asked for.
	Diff string `json:"diff,omitempty"`
}

// Changes of a file.
const (
	fileAdded   = "added"
	fileRemoved = "removed"
	fileChanged = "changed"
)

// processDiff is which processes there are in one state only.
type processDiff struct {
	Started []processView `json:"started"`
	Gone    []processView `json:"gone"`
}

type processView struct {
	PID    int      `json:"pid"`
	Parent int      `json:"parent"`
	Name   string   `json:"name"`
	Args   []string `json:"args"`
}

// diffStates makes a VM of each of two snapshots and compares what is in them.
func (a *app) diffStates(ctx context.Context, n Node, names [2]string, texts bool) (*stateDiff, error) {
	var sides [2]side
	err := both(func(i int) (err error) {
		sides[i].vm, err = stateOf(ctx, n, names[i])
		return err
	})
	defer func() {
		for _, s := range sides {
			if s.vm != nil {
				_ = end(ctx, s.vm, true) // it ends with this process at the latest
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	if err := both(func(i int) error { return sides[i].look(ctx) }); err != nil {
		return nil, err
	}
	c := comparison{before: &sides[0], after: &sides[1], texts: texts, diff: &stateDiff{Files: []fileChange{}}}
	if err := c.files(ctx); err != nil {
		return nil, err
	}
	c.diff.Processes = processDiff{
		Started: sides[1].without(&sides[0]),
		Gone:    sides[0].without(&sides[1]),
	}
	return c.diff, nil
}

// stateOf makes a VM of a snapshot to look at, of which nothing is left in the end.
func stateOf(ctx context.Context, n Node, name string) (VM, error) {
	return n.Restore(ctx, name, node.Options{Attached: true, Passing: true, Time: machine.TimeFrozen, Recording: node.RecordNone})
}

// both does something for two sides at once.
func both(do func(i int) error) error {
	var errs [2]error
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() { errs[i] = do(i) })
	}
	all.Wait()
	return errors.Join(errs[:]...)
}

// side is one of two states, in a VM.
type side struct {
	vm VM
	// goesOn: it is no copy of a state but the VM itself, as it is now.
	goesOn bool

	scan  *client.Scan
	files map[string]*client.ScannedFile
}

func (s *side) look(ctx context.Context) error {
	scan, err := s.vm.Guest().Scan(ctx, "/")
	if errors.Is(err, &client.Error{Code: proto.CodeUnsupported}) {
		return failure.New(failure.SnapshotUnsupported, "the guest agent in the snapshot is too old to say what files there are: compare with --blocks: %w", err)
	}
	if err != nil {
		return guestFailure(ctx, s.vm, err)
	}
	s.scan, s.files = scan, make(map[string]*client.ScannedFile, len(scan.Files))
	for i := range scan.Files {
		s.files[string(scan.Files[i].Path)] = &scan.Files[i]
	}
	return nil
}

// settled says whether a file is as it was in the snapshot.
func (s *side) settled(f *client.ScannedFile) bool {
	return f == nil || s.goesOn || s.scan.RenewedNS == 0 || f.CtimeNS < s.scan.RenewedNS
}

// without are the processes that the other state does not have.
func (s *side) without(other *side) []processView {
	type key struct {
		pid   int
		start uint64
	}
	has := map[key]bool{}
	for _, p := range other.scan.Processes {
		has[key{p.PID, p.Start}] = true
	}
	only := []processView{}
	for _, p := range s.scan.Processes {
		since := s.scan.RenewedTicks > 0 && p.Start > s.scan.RenewedTicks
		if has[key{p.PID, p.Start}] || since {
			continue
		}
		only = append(only, processView{PID: p.PID, Parent: p.Parent, Name: string(p.Name), Args: append([]string{}, proto.Strings(p.Args)...)})
	}
	slices.SortFunc(only, func(a, b processView) int { return cmp.Compare(a.PID, b.PID) })
	return only
}

// comparison compares two sides file by file.
type comparison struct {
	before, after *side
	texts         bool
	// pass, if there is one, says which files are not compared.
	pass func(path string, a, b *client.ScannedFile) bool
	diff *stateDiff
}

func (c *comparison) files(ctx context.Context) error {
	var paths []string
	for path := range c.before.files {
		paths = append(paths, path)
	}
	for path := range c.after.files {
		if c.before.files[path] == nil {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	for _, path := range paths {
		if err := c.file(ctx, path, c.before.files[path], c.after.files[path]); err != nil {
			return err
		}
	}
	for _, s := range []*side{c.before, c.after} {
		for _, path := range proto.Strings(s.scan.Unread) {
			if !slices.Contains(c.diff.Unread, path) {
				c.diff.Unread = append(c.diff.Unread, path)
			}
		}
	}
	return nil
}

// file compares one file; nil on a side that does not have it.
func (c *comparison) file(ctx context.Context, path string, a, b *client.ScannedFile) error {
	if a != nil && b != nil && sameState(a, b) || c.pass != nil && c.pass(path, a, b) {
		return nil
	}
	if !c.before.settled(a) || !c.after.settled(b) {
		c.diff.Unsettled = append(c.diff.Unsettled, path)
		return nil
	}
	change := fileChange{Path: path, Change: fileChanged}
	switch {
	case a == nil:
		change.Change, change.Kind = fileAdded, b.Kind
	case b == nil:
		change.Change, change.Kind = fileRemoved, a.Kind
	default:
		change.Kind = b.Kind
		change.What = attributes(a, b)
	}
	if err := c.contents(ctx, &change, a, b); err != nil {
		return err
	}
	if change.Change != fileChanged || len(change.What) > 0 {
		c.diff.Files = append(c.diff.Files, change)
	}
	return nil
}

// sameState says that a file was not touched between two states. Devices are
// numbered by the kernel as it finds them.
func sameState(a, b *client.ScannedFile) bool {
	x, y := *a, *b
	x.Device, y.Device = 0, 0
	if x.Kind == proto.KindDirectory && y.Kind == proto.KindDirectory { // what is in it is compared itself
		x.Size, x.MtimeNS, x.CtimeNS, y.Size, y.MtimeNS, y.CtimeNS = 0, 0, 0, 0, 0, 0
	}
	return x == y
}

// attributes are what differs apart from contents.
func attributes(a, b *client.ScannedFile) (what []string) {
	for _, d := range []struct {
		name    string
		differs bool
	}{
		{"kind", a.Kind != b.Kind},
		{"mode", a.Mode != b.Mode},
		{"owner", a.UID != b.UID || a.GID != b.GID},
		{"target", a.Target != b.Target},
		{"device", a.Special != b.Special},
	} {
		if d.differs {
			what = append(what, d.name)
		}
	}
	return what
}

// contents compares what is in two regular files.
func (c *comparison) contents(ctx context.Context, change *fileChange, a, b *client.ScannedFile) error {
	isFile := func(f *client.ScannedFile) bool { return f != nil && f.Kind == proto.KindFile }
	if isFile(a) {
		change.SizeBefore = &a.Size
	}
	if isFile(b) {
		change.Size = &b.Size
	}
	compared := isFile(a) && isFile(b)
	differ := compared && a.Size != b.Size
	if !compared && !c.texts || differ && !c.texts || !isFile(a) && !isFile(b) {
		if differ {
			change.What = append([]string{"contents"}, change.What...)
		}
		return nil
	}
	var x, y *sample
	err := both(func(i int) (err error) {
		if i == 0 {
			x, err = fetchSample(ctx, c.before.vm, a)
		} else {
			y, err = fetchSample(ctx, c.after.vm, b)
		}
		return err
	})
	if err != nil {
		return err
	}
	if compared && x.String() == y.String() {
		return nil
	}
	if compared {
		change.What = append([]string{"contents"}, change.What...)
	}
	if c.texts && x.isText() && y.isText() {
		change.Diff = unified(x.kept.Bytes(), y.kept.Bytes())
	}
	return nil
}

// sample is a file's digest, and the beginning of what is in it.
type sample struct {
	digest
	kept bytes.Buffer
}

func (s *sample) Write(p []byte) (int, error) {
	s.kept.Write(p[:min(len(p), maxTextDiff+1-s.kept.Len())])
	return s.digest.Write(p)
}

func (s *sample) isText() bool { return s.kept.Len() <= maxTextDiff && isText(s.kept.Bytes()) }

// fetchSample reads a file of a guest; of one that is none it is empty.
func fetchSample(ctx context.Context, vm VM, f *client.ScannedFile) (*sample, error) {
	s := &sample{digest: *newDigest()}
	if f == nil || f.Kind != proto.KindFile {
		return s, nil
	}
	_, err := vm.Guest().Get(ctx, string(f.Path), s)
	return s, guestFailure(ctx, vm, err)
}

// printStates prints a difference as git and ps would.
func (a *app) printStates(d *stateDiff) error {
	var b strings.Builder
	marks := map[string]string{fileAdded: "A", fileRemoved: "D", fileChanged: "M"}
	for _, f := range d.Files {
		b.WriteString(marks[f.Change] + " " + output.Visible(f.Path))
		if len(f.What) > 0 {
			b.WriteString("  (" + strings.Join(f.What, ", ") + ")")
		}
		b.WriteString("\n")
		if f.Diff != "" {
			b.WriteString(visibleLines(f.Diff))
		}
	}
	for _, p := range []struct {
		word string
		list []processView
	}{{"gone", d.Processes.Gone}, {"started", d.Processes.Started}} {
		for _, v := range p.list {
			command := strings.Join(v.Args, " ")
			if command == "" {
				command = "[" + v.Name + "]"
			}
			fmt.Fprintf(&b, "%s: process %d %s\n", p.word, v.PID, output.Visible(command))
		}
	}
	for _, path := range d.Unsettled {
		fmt.Fprintf(&b, "? %s  (changed while it was looked at)\n", output.Visible(path))
	}
	for _, path := range d.Unread {
		fmt.Fprintf(&b, "? %s  (not read)\n", output.Visible(path))
	}
	_, err := a.Stdout.Write([]byte(b.String()))
	return err
}

// visibleLines is text of a guest, line by line.
func visibleLines(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(output.Visible(strings.TrimSuffix(line, "\n")) + "\n")
	}
	return b.String()
}
