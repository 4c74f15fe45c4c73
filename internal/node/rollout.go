package node

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
)

// Rollout is what is kept of a VM's course, also when the VM is gone: its journal,
// what that speaks of, and its steps.
type Rollout struct {
	id   string // of the VM
	node *Node
	dir  string
}

// ID is the VM's.
func (r *Rollout) ID() string { return r.id }

func (n *Node) rolloutsDir() string { return filepath.Join(n.config.DataDir, "rollouts") }

func (n *Node) rollout(id string) *Rollout {
	return &Rollout{id: id, node: n, dir: filepath.Join(n.rolloutsDir(), id)}
}

// Rollouts returns all rollouts of which there is a record, in the order of their
// IDs.
func (n *Node) Rollouts() ([]*Rollout, error) {
	entries, err := os.ReadDir(n.rolloutsDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("list rollouts: %w", err))
	}
	var all []*Rollout
	for _, e := range entries {
		if isID(e.Name()) {
			all = append(all, n.rollout(e.Name()))
		}
	}
	return all, nil
}

// FindRollout returns the rollout of the VM with this name, ID, or beginning of an
// ID that no other has. A name is that of the VM that has it now or, if none has,
// of the last one that had.
func (n *Node) FindRollout(ref string) (*Rollout, error) {
	if id, err := os.Readlink(filepath.Join(n.namesDir(), ref)); err == nil && checkName(ref) == nil && exists(n.rollout(id).dir) {
		return n.rollout(id), nil
	}
	all, err := n.Rollouts()
	if err != nil {
		return nil, err
	}
	var found []*Rollout
	for _, r := range all {
		if r.id == ref {
			return r, nil
		}
		if len(ref) >= 3 && strings.HasPrefix(r.id, ref) {
			found = append(found, r)
		}
	}
	switch len(found) {
	case 0:
		return n.lastNamed(ref, all)
	case 1:
		return found[0], nil
	}
	return nil, failure.New(failure.InvalidArgument, "%d rollouts have an id that begins with %q", len(found), ref)
}

// lastNamed returns the rollout that was begun last under a name.
func (n *Node) lastNamed(name string, all []*Rollout) (*Rollout, error) {
	var last *Rollout
	var begun *journal.Line
	for _, r := range all {
		first, created, err := r.Begin()
		if err == nil && created.Name == name && (last == nil || first.Time.After(begun.Time)) {
			last, begun = r, first
		}
	}
	if last == nil {
		return nil, failure.New(failure.RolloutNotFound, "no rollout named %q is on record", name)
	}
	return last, nil
}

// open opens the journal to append to it.
func (r *Rollout) open() (*journal.Journal, error) {
	j, err := journal.Open(r.dir, r.id)
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return j, nil
}

// Note adds a line to the journal and returns it as the new head. Snapshots and
// verdicts are on the disk when it returns.
func (r *Rollout) Note(event string, data any) (journal.Head, error) {
	j, err := r.open()
	if err != nil {
		return journal.Head{}, err
	}
	defer j.Close()
	head, err := j.Append(event, data)
	switch {
	case err != nil:
	case event == journal.EventSnapshot, event == journal.EventVerdict:
		err = j.Sync()
	case event == journal.EventRemoved:
		err = j.Finish()
	}
	if err != nil {
		return head, failure.As(failure.Internal, err)
	}
	return head, nil
}

// head is the last line of the journal now.
func (r *Rollout) head() (journal.Head, error) {
	j, err := r.open()
	if err != nil {
		return journal.Head{}, err
	}
	defer j.Close()
	return j.Head()
}

// Journal opens the journal to read it as it is now.
func (r *Rollout) Journal() (*journal.File, error) {
	f, err := journal.OpenFile(r.dir, r.id)
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return f, nil
}

// Begin returns the journal's first line and what it says.
func (r *Rollout) Begin() (*journal.Line, *journal.Created, error) {
	f, err := r.Journal()
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	first, err := f.Next()
	if err == io.EOF {
		err = failure.New(failure.RolloutNotFound, "the journal of rollout %s is empty", r.id)
	}
	if err != nil {
		return nil, nil, err
	}
	var created journal.Created
	return first, &created, first.Decode(&created)
}

// Kept returns what is kept of contents that the journal speaks of.
func (r *Rollout) Kept(c *journal.Contents) ([]byte, error) { return journal.Kept(r.dir, c) }

// Steps returns the names of the snapshots behind the rollout's operations, in
// their order.
func (r *Rollout) Steps() ([]string, error) {
	names, err := r.node.store.Names()
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	var steps []string
	for _, name := range names {
		if id, _, ok := parseStep(name); ok && id == r.id {
			steps = append(steps, name)
		}
	}
	sort.Slice(steps, func(i, j int) bool {
		_, a, _ := parseStep(steps[i])
		_, b, _ := parseStep(steps[j])
		return a < b
	})
	return steps, nil
}

// Remove removes all of it. The VM must be gone.
func (r *Rollout) Remove() error {
	if exists(filepath.Join(r.node.vmsDir(), r.id)) {
		return failure.New(failure.InvalidArgument, "the vm of rollout %s is still there; remove it first", r.id)
	}
	steps, err := r.Steps()
	if err != nil {
		return err
	}
	for _, name := range steps {
		if err := r.node.RemoveSnapshot(name); err != nil && !failure.Is(err, failure.SnapshotNotFound) {
			return err
		}
	}
	if err := os.RemoveAll(r.dir); err != nil {
		return failure.As(failure.Internal, fmt.Errorf("remove rollout (%s): %w", r.id, err))
	}
	return nil
}

// stepName is the name of the snapshot behind the operation in a line.
func stepName(rollout string, seq uint64) string {
	return rollout + "." + strconv.FormatUint(seq, 10)
}

// parseStep is the way back; such names are kept for steps.
func parseStep(name string) (rollout string, seq uint64, ok bool) {
	rollout, number, _ := strings.Cut(name, ".")
	seq, err := strconv.ParseUint(number, 10, 64)
	return rollout, seq, err == nil && isID(rollout) && name == stepName(rollout, seq)
}

// IsStep says whether a snapshot is a step of a rollout, by its name.
func IsStep(name string) bool {
	_, _, ok := parseStep(name)
	return ok
}

func isID(s string) bool { return len(s) == 2*idBytes && strings.Trim(s, "0123456789abcdef") == "" }

// snapshotName is the name of a snapshot that a user speaks of: its own, or
// ROLLOUT@LINE for the state behind an operation in a rollout's journal; line 1,
// its creation, stands for the snapshot that it began from.
func (n *Node) snapshotName(ref string) (string, error) {
	of, line, found := strings.Cut(ref, "@")
	if !found {
		return ref, nil
	}
	seq, err := strconv.ParseUint(line, 10, 64)
	if err != nil || seq == 0 {
		return "", failure.New(failure.InvalidArgument, "step %q: what is behind the @ is no line of a journal", ref)
	}
	r, err := n.FindRollout(of)
	if err != nil {
		return "", err
	}
	if seq > 1 {
		return r.step(seq)
	}
	_, created, err := r.Begin()
	if err != nil {
		return "", err
	}
	if created.Snapshot == "" {
		return "", failure.New(failure.SnapshotNotFound, "rollout %s did not begin from a snapshot", of)
	}
	return created.Snapshot, nil
}

// step is the name of the step behind a line, if there is one.
func (r *Rollout) step(seq uint64) (string, error) {
	name := stepName(r.id, seq)
	if _, err := r.node.store.Stat(name); err == nil {
		return name, nil
	}
	steps, err := r.Steps()
	if err != nil {
		return "", err
	}
	have := "it has none"
	if len(steps) > 0 {
		_, first, _ := parseStep(steps[0])
		_, last, _ := parseStep(steps[len(steps)-1])
		have = fmt.Sprintf("it has %d, from line %d to %d", len(steps), first, last)
	}
	return "", failure.New(failure.SnapshotNotFound, "rollout %s has no step behind line %d of its journal: %s", r.id, seq, have)
}
