package agent_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/agenttest"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
)

// forCases is a guest for the cases of package agenttest, which run in real guests
// as well.
func (g *guest) forCases(t *testing.T) *agenttest.Guest {
	t.Helper()
	dir := filepath.Join(g.dir, "case")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return &agenttest.Guest{Client: g.Client, Dir: dir, Counted: testkit.Counted()}
}

func TestCaseB6(t *testing.T) {
	t.Run("cgroup", func(t *testing.T) { agenttest.B6(t, startContained(t).forCases(t)) })
	t.Run("process group", func(t *testing.T) { agenttest.B6(t, start(t, agent.Config{}).forCases(t)) })
}

func TestCaseB7(t *testing.T) { agenttest.B7(t, startContained(t).forCases(t)) }
func TestCaseB8(t *testing.T) { agenttest.B8(t, startInit(t).forCases(t)) }
func TestCaseB9(t *testing.T) { agenttest.B9(t, start(t, agent.Config{}).forCases(t)) }

// TestCaseB10 has the full size of what is quick without a virtual machine.
func TestCaseB10(t *testing.T) {
	g := start(t, agent.Config{}).forCases(t)
	g.Full = !testkit.InLab() && !testing.Short()
	agenttest.B10(t, g)
}

func TestCaseB11(t *testing.T) {
	g := start(t, agent.Config{}).forCases(t)
	agenttest.B11(t, g)
	t.Run("long file", func(t *testing.T) { agenttest.LongFile(t, g, g.Dir, 192<<20) })
}

// Input that a command does not take, and output that the host does not.
func TestStreamsThatEndEarly(t *testing.T) {
	g := start(t, agent.Config{})
	r, _ := g.run(t, client.Command{Args: []string{"sh", "-c", "exec <&-; sleep 0.2"}, Stdin: endless{}})
	if r.ExitCode != 0 {
		t.Errorf("got %+v", r)
	}
	r, err := g.Exec(context.Background(), client.Command{Args: []string{"head", "-c", "1000000", "/dev/zero"}, Stdout: failing{}})
	if !errors.Is(err, io.ErrShortBuffer) || r.ExitCode != 0 {
		t.Errorf("got %+v, %v, want the Writer's error and the result", r, err)
	}
}

// What goes through all three streams of one command comes back as it was sent.
func TestThreeStreams(t *testing.T) {
	g := start(t, agent.Config{})
	input := strings.Repeat("all three\n", 200_000)
	r, o := g.run(t, client.Command{Args: []string{"tee", "/dev/stderr"}, Stdin: strings.NewReader(input)})
	if r.ExitCode != 0 || o.stdout.String() != input || o.stderr.String() != input {
		t.Errorf("got %+v, %d and %d bytes of %d", r, o.stdout.Len(), o.stderr.Len(), len(input))
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortBuffer }
