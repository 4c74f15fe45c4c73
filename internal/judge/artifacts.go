package judge

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/guest/task"
)

// workTreeExclude is what of a work tree is never transplanted: what git itself keeps,
// hooks and configuration among it, and compiled modules that Python would load in the
// place of their sources.
var workTreeExclude = []string{".git", "__pycache__", "*.pyc"}

// transplanter copies artifacts from a fork of the rollout to a clean machine. What it
// is sent is data that nobody trusts.
type transplanter struct {
	from, to Guest
	limits   *sieve
	done     Transplanted
}

// sourceError says that the rollout's side failed.
type sourceError struct{ err error }

func (e *sourceError) Error() string { return e.err.Error() }
func (e *sourceError) Unwrap() error { return e.err }

// transplant copies what the task declares. The error is a *sourceError if the fork
// could not be read.
func (t *transplanter) transplant(ctx context.Context, v *Verifier) error {
	for _, a := range v.Artifacts {
		if err := t.artifact(ctx, a); err != nil {
			return fmt.Errorf("artifact %s: %w", a.Source, err)
		}
	}
	if v.WorkTree == "" {
		return nil
	}
	exclude := append(append([]string{}, workTreeExclude...), v.Exclude...)
	if err := t.artifact(ctx, task.Artifact{Source: v.WorkTree, Exclude: exclude}); err != nil {
		return fmt.Errorf("work tree %s: %w", v.WorkTree, err)
	}
	return nil
}

func (t *transplanter) artifact(ctx context.Context, a task.Artifact) error {
	if a.Destination != "" {
		return t.one(ctx, a.Source, a.Destination, a.Exclude)
	}
	sources, err := t.expand(ctx, a.Source)
	if err != nil {
		return err
	}
	if len(sources) == 0 {
		t.done.Missing = append(t.done.Missing, a.Source)
	}
	for _, s := range sources {
		if err := t.one(ctx, s, s, a.Exclude); err != nil {
			return err
		}
	}
	return nil
}

// expand lists the paths that a pattern stands for. A path without one is itself.
func (t *transplanter) expand(ctx context.Context, pattern string) ([]string, error) {
	if !strings.ContainsAny(pattern, `*?[\`) {
		return []string{pattern}, nil
	}
	paths := []string{"/"}
	for part := range strings.SplitSeq(strings.TrimPrefix(pattern, "/"), "/") {
		var next []string
		for _, dir := range paths {
			if !strings.ContainsAny(part, `*?[\`) {
				next = append(next, path.Join(dir, part))
				continue
			}
			entries, err := t.from.List(ctx, dir)
			switch answered(err) {
			case "":
			case proto.CodeFileNotFound, proto.CodeNotADirectory:
				continue
			}
			if err != nil {
				return nil, &sourceError{err}
			}
			for _, e := range entries {
				if ok, _ := path.Match(part, e.Path); ok { // the pattern was checked
					next = append(next, path.Join(dir, e.Path))
				}
			}
			if len(next) > int(t.limits.entries) {
				return nil, errTooMuch
			}
		}
		paths = next
	}
	return paths, nil
}

// one copies a file or a directory.
func (t *transplanter) one(ctx context.Context, from, to string, exclude []string) error {
	// Most are directories: nothing is asked before they are read.
	err := t.stream(ctx, client.Placement{Dir: to, Owners: true, Replace: true, Spare: exclude}, exclude, func(w io.Writer) error {
		_, err := t.from.GetExactTree(ctx, from, w)
		return err
	})
	var source *sourceError
	if !errors.As(err, &source) {
		return err
	}
	switch answered(err) {
	case proto.CodeFileNotFound:
		t.done.Missing = append(t.done.Missing, from)
		return t.clear(ctx, to, exclude)
	case proto.CodeNotADirectory:
		return t.file(ctx, from, to, exclude)
	}
	return err
}

// file copies what is no directory.
func (t *transplanter) file(ctx context.Context, from, to string, exclude []string) error {
	info, err := t.from.Stat(ctx, from)
	switch {
	case answered(err) == proto.CodeFileNotFound, answered(err) == proto.CodeNotADirectory:
		t.done.Missing = append(t.done.Missing, from)
	case err != nil:
		return &sourceError{err}
	case info.Kind == client.KindFile:
		if err := t.clear(ctx, to, nil); err != nil {
			return err
		}
		place := client.Placement{Dir: path.Dir(to), Owners: true}
		return t.stream(ctx, place, nil, func(w io.Writer) error { return t.packFile(ctx, info, path.Base(to), w) })
	default:
		t.limits.leaveOut(&t.done, from)
	}
	return t.clear(ctx, to, exclude)
}

// clear takes from the clean machine what an artifact stands for; of a directory in which
// something may be spared, what is in it and is not.
func (t *transplanter) clear(ctx context.Context, to string, spare []string) error {
	info, err := t.to.Stat(ctx, to)
	switch {
	case answered(err) == proto.CodeFileNotFound, answered(err) == proto.CodeNotADirectory:
		return nil
	case err != nil:
		return err
	case info.Kind != client.KindDirectory || len(spare) == 0:
		return t.to.Remove(ctx, to, true)
	}
	_, err = t.to.PlaceTree(ctx, client.Placement{Dir: to, Replace: true, Spare: spare}, strings.NewReader(""))
	return err
}

// packFile makes a tar stream of one file.
func (t *transplanter) packFile(ctx context.Context, info client.File, name string, w io.Writer) error {
	archive := tar.NewWriter(w)
	h := tar.Header{
		Typeflag: tar.TypeReg, Name: name, Size: info.Size, Mode: int64(info.Mode.Perm()),
		Uid: int(info.UID), Gid: int(info.GID), ModTime: info.Modified, Format: tar.FormatPAX,
	}
	if err := archive.WriteHeader(&h); err != nil {
		return err
	}
	if _, err := t.from.Get(ctx, info.Path, archive); err != nil {
		return err
	}
	return archive.Close()
}

// stream passes a tar stream of the fork through the sieve into a directory of the
// clean machine, of which nothing is touched before the stream has begun.
func (t *transplanter) stream(ctx context.Context, to client.Placement, exclude []string, source func(io.Writer) error) error {
	rawR, rawW := io.Pipe()
	cleanR, cleanW := io.Pipe()
	read, sifted := make(chan error, 1), make(chan error, 1)
	go func() {
		err := source(rawW)
		rawW.CloseWithError(err)
		read <- err
	}()
	raw := bufio.NewReader(rawR)
	if _, err := raw.Peek(1); err != nil {
		if failed := <-read; failed != nil {
			err = failed
		}
		return &sourceError{err}
	}
	go func() {
		err := t.limits.sift(raw, cleanW, exclude, &t.done)
		rawR.CloseWithError(io.ErrClosedPipe) // nobody reads it any more
		cleanW.CloseWithError(err)
		sifted <- err
	}()
	_, err := t.to.PlaceTree(ctx, to, cleanR)
	cleanR.CloseWithError(io.ErrClosedPipe)
	siftErr, readErr := <-sifted, <-read
	switch {
	case siftErr != nil && !errors.Is(siftErr, io.ErrClosedPipe):
		if readErr != nil && !errors.Is(readErr, io.ErrClosedPipe) {
			return &sourceError{readErr}
		}
		return siftErr
	case readErr != nil && !errors.Is(readErr, io.ErrClosedPipe):
		return &sourceError{readErr}
	}
	return err
}
