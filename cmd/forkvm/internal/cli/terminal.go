package cli

import (
	"context"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
)

// terminal is the user's, lent to a command in a guest: every key goes there,
// and the size follows.
type terminal struct {
	fd       int
	before   *term.State
	changed  chan os.Signal
	watching sync.WaitGroup
}

// onTerminal returns the terminal that a command can have.
func (a *app) onTerminal() (*os.File, error) {
	in, isFile := a.Stdin.(*os.File)
	if !isFile || !term.IsTerminal(int(in.Fd())) {
		return nil, usagef("-t: standard input is no terminal; -i alone connects what it is")
	}
	if a.format.Machine() {
		return nil, usagef("-t: a terminal and -o %s do not go together", a.format)
	}
	return in, nil
}

// openTerminal connects a command to the terminal that standard input is.
func (a *app) openTerminal(c *client.Command) (*terminal, error) {
	in, err := a.onTerminal()
	if err != nil {
		return nil, err
	}
	t := &terminal{fd: int(in.Fd()), changed: make(chan os.Signal, 1)}
	if t.before, err = term.MakeRaw(t.fd); err != nil {
		return nil, err
	}
	size := t.size()
	sizes := make(chan client.TerminalSize, 1)
	c.Terminal, c.Resize, c.Stdin = &size, sizes, in
	if name := a.User.Getenv("TERM"); name != "" && !names(c.Env, "TERM") {
		c.Env = append(c.Env, "TERM="+name)
	}
	signal.Notify(t.changed, syscall.SIGWINCH)
	t.watching.Go(func() {
		for range t.changed {
			select {
			case <-sizes: // an older one that nobody took
			default:
			}
			sizes <- t.size()
		}
	})
	return t, nil
}

// size is 80 by 24 where the terminal does not know.
func (t *terminal) size() client.TerminalSize {
	columns, rows, err := term.GetSize(t.fd)
	if err != nil || columns <= 0 || rows <= 0 {
		return client.TerminalSize{Rows: 24, Columns: 80}
	}
	return client.TerminalSize{Rows: uint16(rows), Columns: uint16(columns)}
}

func (t *terminal) close() {
	signal.Stop(t.changed)
	close(t.changed)
	t.watching.Wait()
	_ = term.Restore(t.fd, t.before) // the user sees it if that failed
}

func names(env []string, name string) bool {
	for _, e := range env {
		if strings.HasPrefix(e, name+"=") {
			return true
		}
	}
	return false
}

// defaultShell is the user's login shell, or sh where that is unknown.
var defaultShell = []string{"/bin/sh", "-c", `exec "$(getent passwd "$(id -u)" 2>/dev/null | cut -d: -f7 | grep . || echo /bin/sh)" -l`}

func (a *app) shellVerb() *cobra.Command {
	flags := commandFlags{terminal: true, interactive: true}
	cmd := &cobra.Command{
		Use:   "shell [flags] VM|SNAPSHOT|STEP",
		Short: "Open a login shell in a VM",
		Long: "Open a login shell in a VM; or in one made of a snapshot or of a rollout's step\n" +
			"(ROLLOUT@LINE, see log) for as long as the shell runs.",
		Example:     "  forkvm shell vm-1\n  forkvm shell -u dev vm-1\n  forkvm shell attempt-7@12",
		Annotations: map[string]string{passesExitCode: "yes"},
		Args:        needs("VM"),
	}
	f := cmd.Flags()
	f.StringVarP(&flags.user, "user", "u", "", "user: name or number, with :group if wanted")
	f.StringVarP(&flags.dir, "workdir", "w", "", "working directory")
	f.StringArrayVarP(&flags.env, "env", "e", nil, "set NAME=VALUE, or NAME from this environment")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if err := flags.check(a); err != nil {
			return err
		}
		open := func(ctx context.Context, vm VM) error {
			return a.exec(ctx, vm, a.command(&flags, defaultShell), &flags)
		}
		vm, err := findRunning(ctx, n, args[0])
		if err == nil {
			return open(ctx, vm)
		}
		if _, missing := n.InspectSnapshot(args[0]); missing != nil || !failure.Is(err, failure.VMNotFound) {
			return err
		}
		made, err := n.Restore(ctx, args[0], node.Options{Attached: true, Passing: true, Recording: node.RecordNone})
		if err != nil {
			return err
		}
		return a.whileItLives(ctx, made, true, open)
	})
	return cmd
}
