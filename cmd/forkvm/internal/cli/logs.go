package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
)

func (a *app) logsVerb() *cobra.Command {
	var follow bool
	var command string
	tail := -1
	cmd := &cobra.Command{
		Use:   "logs [flags] VM",
		Short: "Show what a VM's serial console printed, or a detached command",
		Long: "Show what a VM's serial console printed, or with --command what a detached command\n" +
			"has written: the newest megabyte of it. On a terminal control characters are made\n" +
			"visible, so that a guest cannot steer it.",
		Args: needs("VM"),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the VM, or the command, has ended")
	cmd.Flags().StringVar(&command, "command", "", "the detached command with this id, instead of the console")
	cmd.Flags().IntVarP(&tail, "tail", "n", -1, "begin with this many of the last lines; -1 for all")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if command != "" {
			if tail >= 0 {
				return usagef("-n is for the console")
			}
			vm, err := oneVM(ctx, n, args)
			if err != nil {
				return err
			}
			return a.showCommand(ctx, vm, command, follow)
		}
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		c, err := openConsole(vm.Paths().Console)
		if err != nil {
			return err
		}
		defer c.Close()
		if tail >= 0 {
			if err := c.skipToLast(tail); err != nil {
				return err
			}
		}
		return a.visibly(a.Stdout, func(w io.Writer) error {
			if follow {
				return c.follow(ctx, vm, w)
			}
			return c.copy(w)
		})
	})
	return cmd
}

// follow shows a VM's console until its end.
func (a *app) follow(ctx context.Context, vm VM, w io.Writer) error {
	c, err := openConsole(vm.Paths().Console)
	if err != nil {
		return err
	}
	defer c.Close()
	return a.visibly(w, func(w io.Writer) error { return c.follow(ctx, vm, w) })
}

// visibly makes what is written harmless if it ends on a terminal.
func (a *app) visibly(w io.Writer, do func(io.Writer) error) error {
	if !a.StdoutTerminal {
		return do(w)
	}
	v := output.NewVisibleWriter(w)
	return errors.Join(do(v), v.Close())
}

// console reads a console log, which the VM's process shortens from the front
// when it has become too long.
type console struct {
	file   *os.File
	offset int64
	// last are the newest bytes that were read, by which the place is found
	// again in a log that was shortened.
	last []byte
}

// landmark is how many bytes are enough to recognise a place in a log.
const landmark = 512

func openConsole(path string) (*console, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("read console: %w", err))
	}
	return &console{file: f}, nil
}

func (c *console) Close() error { return c.file.Close() }

// copy copies what is new.
func (c *console) copy(w io.Writer) error {
	info, err := c.file.Stat()
	if err != nil {
		return fmt.Errorf("read console: %w", err)
	}
	if info.Size() < c.offset {
		if err := c.findPlace(info.Size()); err != nil {
			return err
		}
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := c.file.ReadAt(buf, c.offset)
		if n > 0 {
			c.offset += int64(n)
			c.last = append(c.last, buf[:n]...)
			c.last = append([]byte(nil), c.last[max(0, len(c.last)-landmark):]...)
			if _, err := w.Write(buf[:n]); err != nil {
				return fmt.Errorf("write output: %w", err)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read console: %w", err)
		}
	}
}

// findPlace goes on behind what was read last in a log that was shortened, or at
// its beginning if that is not in it any more.
func (c *console) findPlace(size int64) error {
	kept := make([]byte, size)
	if _, err := c.file.ReadAt(kept, 0); err != nil && err != io.EOF {
		return fmt.Errorf("read console: %w", err)
	}
	c.offset = 0
	if i := bytes.LastIndex(kept, c.last); i >= 0 {
		c.offset = int64(i + len(c.last))
	}
	return nil
}

// skipToLast moves to the beginning of the last lines.
func (c *console) skipToLast(lines int) error {
	content, err := io.ReadAll(io.NewSectionReader(c.file, 0, 1<<40))
	if err != nil {
		return fmt.Errorf("read console: %w", err)
	}
	c.offset = int64(startOfLast(content, lines))
	return nil
}

// startOfLast is where the last lines of a text begin. A newline at the end
// begins no line.
func startOfLast(text []byte, lines int) int {
	at := len(text)
	if at > 0 && text[at-1] == '\n' {
		at--
	}
	for ; lines > 0; lines-- {
		at = bytes.LastIndexByte(text[:at], '\n')
		if at < 0 {
			return 0
		}
	}
	if at == len(text) {
		return at
	}
	return at + 1
}

// pollInterval is how often a console is looked at.
const pollInterval = 50 * time.Millisecond

// follow copies until the VM's end.
func (c *console) follow(ctx context.Context, vm VM, w io.Writer) error {
	watch, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		vm.Wait(watch) // whatever ended it: it is over
	}()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if err := c.copy(w); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ended:
			return c.copy(w) // what came since
		case <-tick.C:
		}
	}
}
