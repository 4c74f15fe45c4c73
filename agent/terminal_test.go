package agent_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
)

func needTerminals(t *testing.T) {
	t.Helper()
	if f, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0); err != nil {
		testkit.Require(t, "terminals", "needs /dev/ptmx: "+err.Error())
	} else {
		f.Close()
	}
}

// screen collects what a terminal shows.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestTerminal(t *testing.T) {
	needTerminals(t)
	g := start(t, agent.Config{})
	var shown screen
	r, err := g.Exec(context.Background(), client.Command{
		Args:     []string{"sh", "-c", "tty && stty size && [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && ps -o tpgid= -p $$ | grep -qw $$ && cat && exit 7"},
		Terminal: &client.TerminalSize{Rows: 33, Columns: 101},
		Stdin:    strings.NewReader("typed\n"),
		Stdout:   &shown,
	})
	if err != nil || r.ExitCode != 7 {
		t.Errorf("%+v, %v", r, err)
	}
	// What is typed is echoed, and cat says it once more.
	got := shown.String()
	if !strings.Contains(got, "/dev/pts/") || !strings.Contains(got, "33 101\r\n") || strings.Count(got, "typed\r\n") != 2 {
		t.Errorf("shown: %q", got)
	}
}

// All that a command has written is shown, although its terminal passes it on in
// the background, and although another process keeps the terminal open.
func TestTerminalShowsEverything(t *testing.T) {
	needTerminals(t)
	g := start(t, agent.Config{})
	pid := filepath.Join(g.dir, "pid")
	killAtEnd(t, pid)
	for _, script := range []string{
		"stty -opost; seq 30000",
		"stty -opost; (trap '' HUP; exec sleep 1000) & echo $! > " + pid + "; seq 30000",
	} {
		var shown, want screen
		for i := range 30000 {
			io.WriteString(&want, strconv.Itoa(i+1)+"\n")
		}
		begun := time.Now()
		r, err := g.Exec(context.Background(), client.Command{
			Args: []string{"sh", "-c", script}, Terminal: &client.TerminalSize{Rows: 24, Columns: 80}, Stdout: &shown,
		})
		if err != nil || r.ExitCode != 0 || shown.String() != want.String() {
			t.Errorf("%+v, %v: %d bytes shown, want %d", r, err, len(shown.String()), len(want.String()))
		}
		if waited := time.Since(begun); waited > 100*time.Second {
			t.Errorf("waited %v for the other process", waited)
		}
	}
}

func TestTerminalResizeAndInterrupt(t *testing.T) {
	needTerminals(t)
	g := start(t, agent.Config{})
	in, typed := io.Pipe()
	defer typed.Close()
	var shown screen
	sizes := make(chan client.TerminalSize)
	p, err := g.Start(context.Background(), client.Command{
		Args:     []string{"sh", "-c", "trap 'stty size' WINCH; echo ready; while :; do sleep 0.02; done"},
		Terminal: &client.TerminalSize{Rows: 24, Columns: 80}, Resize: sizes, Stdin: in, Stdout: &shown,
	})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "ready", func() bool { return strings.Contains(shown.String(), "ready") })
	sizes <- client.TerminalSize{Rows: 50, Columns: 132}
	eventually(t, "new size", func() bool { return strings.Contains(shown.String(), "50 132") })
	typed.Write([]byte{3}) // ^C
	if r, err := p.Wait(); err != nil || r.Signal != 2 || r.ExitCode != 130 {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestTerminalOwner(t *testing.T) {
	testkit.RequireRoot(t)
	needTerminals(t)
	g := start(t, agent.Config{})
	var shown screen
	r, err := g.Exec(context.Background(), client.Command{
		Args: []string{"sh", "-c", "echo to the terminal > $(tty)"}, User: "12345",
		Terminal: &client.TerminalSize{Rows: 24, Columns: 80}, Stdout: &shown,
	})
	if err != nil || r.ExitCode != 0 || !strings.Contains(shown.String(), "to the terminal") {
		t.Errorf("%+v, %v: %q", r, err, shown.String())
	}
}
