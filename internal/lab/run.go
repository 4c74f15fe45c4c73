package lab

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/forkvm/forkvm/internal/lab/wire"
)

// Command is what a machine runs.
type Command struct {
	Argv []string
	Env  []string // "NAME=value", in addition to the machine's own environment
	Dir  string   // "": /root

	// Stdin, when not nil, is copied to the command's standard input. The copying is not waited for: a Read that blocks
	// keeps one goroutine until it returns.
	Stdin io.Reader
	// Stdout and Stderr get the output as it comes, all of it from one goroutine; nil discards. While a Write blocks,
	// nothing else arrives from the machine.
	Stdout, Stderr io.Writer

	// KillLeft ends processes that outlive the command.
	KillLeft bool
}

// Outcome is how a command ended.
type Outcome struct {
	Code   int      // exit status; 128 + Signal when a signal ended it, as in a shell
	Signal int      // 0 for a command that exited
	Left   []string // processes that outlived the command, "pid command line"
}

// Shell makes the command of a shell command line.
func Shell(line string) Command { return Command{Argv: []string{"/bin/bash", "-c", line}} }

// killGrace is how long a command that was told to end may take before the machine is taken for dead.
const killGrace = 10 * time.Second

// Run runs a command to its end. An error means that there is no outcome. When ctx ends first, the command and all that it
// started are killed and the error is a *StoppedError; when the machine fails, or does not even do that, a *DeathError.
func (m *Machine) Run(ctx context.Context, c Command) (Outcome, error) {
	id := m.newID()
	doing := strings.Join(c.Argv, " ")
	s := m.open(id, c.Stdout, c.Stderr)
	start := wire.Command{Argv: c.Argv, Env: c.Env, Dir: c.Dir, Stdin: c.Stdin != nil, KillLeft: c.KillLeft}
	if err := m.out.WriteJSON(wire.Start, id, start); err != nil {
		return Outcome{}, m.death(doing, err)
	}
	if c.Stdin != nil {
		go m.feed(id, c.Stdin)
	}
	stop := context.AfterFunc(ctx, func() { _ = m.out.Write(wire.Kill, id, nil) })
	defer stop()
	patience, cancel := withGrace(ctx, killGrace)
	defer cancel()
	frame, err := m.wait(patience, doing, id, s)
	if err != nil {
		return Outcome{}, err
	}
	var outcome wire.Outcome
	if err := frame.JSON(&outcome); err != nil {
		return Outcome{}, err
	}
	if err := ctx.Err(); err != nil {
		return Outcome{}, &StoppedError{doing, err}
	}
	if outcome.Error != "" {
		return Outcome{}, fmt.Errorf("run %s: %s", doing, outcome.Error)
	}
	if outcome.Signal != 0 {
		outcome.Code = 128 + outcome.Signal
	}
	return Outcome{Code: outcome.Code, Signal: outcome.Signal, Left: outcome.Left}, nil
}

// feed copies input to a command. When the machine has gone there is nobody to tell.
func (m *Machine) feed(id uint32, in io.Reader) {
	if _, err := io.Copy(m.out.Stream(wire.Stdin, id), in); err == nil {
		_ = m.out.Write(wire.StdinEnd, id, nil)
	}
}

// withGrace returns a context that ends the given time after ctx, with ctx's own error.
func withGrace(ctx context.Context, grace time.Duration) (context.Context, func()) {
	later, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(grace, func() { cancel(ctx.Err()) })
	})
	return later, func() { stop(); cancel(nil) }
}

// Collect copies what is in a directory of the machine to dir on this one, which it creates when there is anything to
// put there. It returns the number of entries. Files that are there already are replaced.
func (m *Machine) Collect(ctx context.Context, from, dir string) (int, error) {
	id := m.newID()
	reader, writer := io.Pipe()
	s := m.open(id, writer, nil)
	count := make(chan int, 1)
	extracted := make(chan error, 1)
	go func() {
		n, err := extract(reader, dir)
		reader.CloseWithError(errors.New("archive refused")) // the rest of it then falls through
		count <- n
		extracted <- err
	}()
	if err := m.out.WriteJSON(wire.Collect, id, wire.Tree{Path: from}); err != nil {
		writer.CloseWithError(err)
		return 0, m.death("collect "+from, err)
	}
	frame, err := m.wait(ctx, "collect "+from, id, s)
	writer.CloseWithError(io.EOF)
	n, extractErr := <-count, <-extracted
	if err != nil {
		return n, err
	}
	var status wire.Status
	if err := frame.JSON(&status); err != nil {
		return n, err
	}
	return n, errors.Join(status.Err(), extractErr)
}

// extract unpacks an archive below dir, whatever it says: nothing of it reaches outside.
func extract(r io.Reader, dir string) (int, error) {
	archive := tar.NewReader(r)
	var root *os.Root
	defer func() {
		if root != nil {
			root.Close()
		}
	}()
	for n := 0; ; n++ {
		header, err := archive.Next()
		if err == io.EOF {
			_, err := io.Copy(io.Discard, r)
			return n, err
		}
		if err != nil {
			return n, fmt.Errorf("read archive: %w", err)
		}
		if root == nil {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return n, err
			}
			if root, err = os.OpenRoot(dir); err != nil {
				return n, err
			}
		}
		if err := extractEntry(root, header, archive); err != nil {
			return n, fmt.Errorf("unpack %s: %w", header.Name, err)
		}
	}
}

func extractEntry(root *os.Root, header *tar.Header, content io.Reader) error {
	name := filepath.Clean(header.Name)
	mode := fs.FileMode(header.Mode).Perm()
	switch header.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, mode|0o700)
	case tar.TypeSymlink:
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return root.Symlink(header.Linkname, name)
	case tar.TypeReg:
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		file, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode|0o600)
		if err != nil {
			return err
		}
		if _, err := io.Copy(file, content); err != nil {
			file.Close()
			return err
		}
		return file.Close()
	}
	return nil // pipes and device nodes are of no use here
}
