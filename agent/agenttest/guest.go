// Package agenttest has cases of the guest agent's behaviour in which systems like this one went wrong, each under its
// number. They need nothing but a client: the agent's own tests run them with an agent on the development machine, the
// tests of whole machines with the one in a real guest.
package agenttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit/stream"
)

// Guest is where a case runs. Its programs are those of a shell, coreutils and util-linux, or busybox.
type Guest struct {
	*client.Client
	// Dir is an empty directory in the guest.
	Dir string
	// Full runs a case at its full size, or, where the machine is Emulated, at one for which that takes minutes and not hours.
	Full, Emulated bool
	// Counted: the clock counts work, so that limits of time hold on a busy machine, too. Elsewhere they are not checked.
	Counted bool
	// Alone: all processes of the guest that are not the kernel's are the guest agent's, whose memory is its own.
	Alone bool
}

// patience is for what never happens, not for what is slow.
const patience = 2 * time.Minute

// within checks a limit of time.
func (g *Guest) within(t testing.TB, what string, begun time.Time, most time.Duration) {
	t.Helper()
	if took := time.Since(begun); g.Counted && took > most {
		t.Errorf("%s after %v, want %v at most", what, took, most)
	}
}

// scale is a number of the case, or the smaller one that stands for it.
func (g *Guest) scale(full, emulated, reduced int) int {
	switch {
	case !g.Full:
		return reduced
	case g.Emulated:
		return emulated
	}
	return full
}

type output struct{ stdout, stderr bytes.Buffer }

// exec runs a command in Dir, which has to be run, whatever comes of it, and keeps its output where the caller does not.
func (g *Guest) exec(t testing.TB, cmd client.Command) (client.Result, *output) {
	t.Helper()
	r, o, err := g.try(cmd)
	if err != nil {
		t.Fatalf("exec %.100q: %v", cmd.Args, err)
	}
	return r, o
}

// try is exec for goroutines that are not the test's own.
func (g *Guest) try(cmd client.Command) (client.Result, *output, error) {
	o := &output{}
	if cmd.Stdout == nil {
		cmd.Stdout = &o.stdout
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &o.stderr
	}
	if cmd.Dir == "" {
		cmd.Dir = g.Dir
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*patience)
	defer cancel()
	r, err := g.Exec(ctx, cmd)
	return r, o, err
}

func script(text string) client.Command { return client.Command{Args: []string{"sh", "-c", text}} }

// sh runs a script that has to succeed and returns what it prints.
func (g *Guest) sh(t testing.TB, text string) string {
	t.Helper()
	r, o := g.exec(t, script(text))
	if r.ExitCode != 0 {
		t.Fatalf("%s: %+v: %s", text, r, &o.stderr)
	}
	return strings.TrimRight(o.stdout.String(), "\n")
}

// number runs a script that prints one.
func (g *Guest) number(t testing.TB, text string) int {
	t.Helper()
	n, err := strconv.Atoi(g.sh(t, text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return n
}

// alive says whether the process whose number is in a file of Dir runs.
func (g *Guest) alive(t testing.TB, file string) bool {
	t.Helper()
	return g.sh(t, "grep -q '^State:[^Z]*$' /proc/$(cat "+file+")/status 2>/dev/null && echo yes || true") == "yes"
}

// killAtEnd ends processes whose numbers are in files of Dir.
func (g *Guest) killAtEnd(t testing.TB, files ...string) {
	t.Cleanup(func() { _, _, _ = g.try(script("kill -9 $(cat " + strings.Join(files, " ") + ")")) })
}

// hold starts commands that do not end before the test does.
type hold struct {
	t      testing.TB
	g      *Guest
	ctx    context.Context
	cancel context.CancelFunc
	held   []*client.Process
}

func (g *Guest) hold(t testing.TB) *hold {
	h := &hold{t: t, g: g}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

func (h *hold) start(cmd client.Command) {
	h.t.Helper()
	cmd.Dir = h.g.Dir
	p, err := h.g.Start(h.ctx, cmd)
	if err != nil {
		h.t.Fatal(err)
	}
	h.held = append(h.held, p)
}

func (h *hold) release() {
	h.cancel()
	for _, p := range h.held {
		_, _ = p.Wait()
	}
}

// eventually waits for what is to come, in the time of the case where that is measured.
func (g *Guest) eventually(t testing.TB, what string, most time.Duration, ok func() bool) {
	t.Helper()
	begun := time.Now()
	for !ok() {
		if time.Since(begun) > patience {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
	g.within(t, what, begun, most)
}

// workers runs a function so many times at once and returns what went wrong.
func workers(n int, do func(i int) error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = do(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// Unread is a Writer that takes nothing, from its first Write until it is released.
type Unread struct {
	mu      sync.Mutex
	n       int
	release chan struct{}
}

// NewUnread returns the Writer and what releases it.
func NewUnread() (u *Unread, release func()) {
	u = &Unread{release: make(chan struct{})}
	return u, func() { close(u.release) }
}

// Write implements io.Writer.
func (u *Unread) Write(p []byte) (int, error) {
	u.mu.Lock()
	u.n += len(p)
	u.mu.Unlock()
	<-u.release
	return len(p), nil
}

// Count is how many bytes Write was called with.
func (u *Unread) Count() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.n
}

// patterned is so many bytes.
func patterned(size int64, seed uint64) io.Reader { return io.LimitReader(stream.New(seed), size) }

// size names a number of bytes.
func size(n int64) string { return fmt.Sprintf("%d bytes", n) }
