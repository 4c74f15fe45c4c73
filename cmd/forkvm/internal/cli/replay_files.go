package cli

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
)

// replayedFiles compares the files that a replay has left in its VM with those of
// the rollout's steps.
type replayedFiles struct {
	node   Node
	vm     VM
	ignore []string // patterns
	// seen is how each file was when it was last compared: a difference belongs to the
	// line that has brought it about, and what is the same is not read again.
	seen map[string]filePair
}

// filePair is a file in a step and in the replay; zero where it is not there.
type filePair struct{ recorded, replayed client.ScannedFile }

// compare notes what is not as it was behind the line. Without a step nothing is
// known of that.
func (r *replayedFiles) compare(ctx context.Context, l *replayedLine, done *journal.Done) (err error) {
	if r == nil || done == nil || done.Step == "" {
		return nil
	}
	step, err := stateOf(ctx, r.node, done.Step)
	if failure.Is(err, failure.SnapshotNotFound) {
		return nil // it was removed
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end(ctx, step, true)) }()
	sides := [2]side{{vm: step}, {vm: r.vm, goesOn: true}}
	if err := both(func(i int) error { return sides[i].look(ctx) }); err != nil {
		return err
	}
	c := comparison{before: &sides[0], after: &sides[1], pass: r.pass, diff: &stateDiff{Files: []fileChange{}}}
	if err := c.files(ctx); err != nil {
		return err
	}
	l.FilesCompared, l.Files, l.Unsettled = true, c.diff.Files, c.diff.Unsettled
	return nil
}

// pass says whether a file need not be compared.
func (r *replayedFiles) pass(name string, a, b *client.ScannedFile) bool {
	if ignored(name, r.ignore) {
		return true
	}
	var now filePair
	if a != nil {
		now.recorded = *a
	}
	if b != nil {
		now.replayed = *b
	}
	before, known := r.seen[name]
	r.seen[name] = now
	return known && before == now
}

// ignored says whether a pattern is of a file or of a directory that it is in.
func ignored(name string, patterns []string) bool {
	for ; name != "/" && name != "."; name = path.Dir(name) {
		for _, p := range patterns {
			if ok, _ := path.Match(p, name); ok { // the patterns were checked
				return true
			}
		}
	}
	return false
}

// checkPatterns refuses patterns that cannot match.
func checkPatterns(patterns []string) error {
	for _, p := range patterns {
		if _, err := path.Match(p, ""); err != nil || !path.IsAbs(p) || path.Clean(p) != p {
			return usagef("--ignore %q: an absolute path is needed, in which *, ? and […] stand for parts of a name", p)
		}
	}
	return nil
}

// maxShownFiles is how many files people are told of in a line.
const maxShownFiles = 3

// describeFiles is the same in a few words.
func describeFiles(files []fileChange) string {
	var names []string
	for _, f := range files[:min(len(files), maxShownFiles)] {
		what := f.Change
		if len(f.What) > 0 {
			what = strings.Join(f.What, ", ")
		}
		names = append(names, fmt.Sprintf("%s (%s)", output.Visible(f.Path), what))
	}
	if more := len(files) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return "files: " + strings.Join(names, ", ")
}
