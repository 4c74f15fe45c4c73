package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

func conditions(t *testing.T, list ...string) []client.Condition {
	t.Helper()
	var all []client.Condition
	for _, s := range list {
		c, err := client.ParseCondition(s)
		if err != nil || c.String() != s {
			t.Fatalf("%q: got %v, %v", s, c, err)
		}
		all = append(all, c)
	}
	return all
}

func TestWaitFor(t *testing.T) {
	g := start(t, agent.Config{})
	at := program(t, "tcp", "127.0.0.1:0", func(net.Conn) {})
	path := filepath.Join(g.dir, "late")
	begin := time.Now()
	time.AfterFunc(150*time.Millisecond, func() { g.sh(t, "touch late") })
	wanted := conditions(t, "command:test -e "+path, "file:"+path, fmt.Sprintf("port:%d", at.(*net.TCPAddr).Port))
	if err := g.WaitFor(context.Background(), wanted...); err != nil || time.Since(begin) < 150*time.Millisecond {
		t.Errorf("got %v after %v", err, time.Since(begin))
	}
	if err := g.WaitFor(context.Background()); err != nil {
		t.Errorf("no conditions: %v", err)
	}
}

// What is missing is said when the time is up, and only that.
func TestWaitForReports(t *testing.T) {
	g := start(t, agent.Config{})
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Second) // the first command has to end
	defer cancel()
	err := g.WaitFor(ctx, conditions(t, "file:/etc/passwd", "file:/no/such/file", "port:1", "port:/no/such.sock", "command:echo still starting >&2; exit 3", "command:sleep 300", "unit:no-such-unit.service")...)
	var missing *client.NotReadyError
	if !errors.As(err, &missing) || len(missing.Missing) != 6 {
		t.Fatalf("error %v, want six conditions that are missing", err)
	}
	for i, want := range []string{"no such file", "refused", "no such file", "exit code 3: still starting", "not known in time", ""} {
		if got := missing.Missing[i]; got.Reason == "" || !strings.Contains(got.Reason, want) {
			t.Errorf("%v: %q, want %q", got.Condition, got.Reason, want)
		}
	}
	t.Log(err)
}

// What waiting does not help against is not waited for.
func TestWaitForRefuses(t *testing.T) {
	g := start(t, agent.Config{})
	for _, s := range []string{"port:http", "file:relative"} {
		if err := g.WaitFor(context.Background(), conditions(t, s)...); !errors.Is(err, &client.Error{Code: proto.CodeInvalidRequest}) {
			t.Errorf("%s: error %v, want invalid_request", s, err)
		}
	}
	for _, s := range []string{"", "port", "port:", "host:x", "/etc/passwd"} {
		if c, err := client.ParseCondition(s); err == nil {
			t.Errorf("%q is taken as %v", s, c)
		}
	}
}

func TestUsage(t *testing.T) {
	g := start(t, agent.Config{Version: "1.2.3"})
	g.detach(t, "sleeps", "sleep 300")
	u, err := g.Usage(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if u.CPUs < 1 || u.BusyMS <= 0 || u.Tasks < 1 || u.UptimeMS <= 0 || u.Memory.TotalBytes <= u.Memory.AvailableBytes || u.Memory.AvailableBytes <= 0 || u.Root.TotalBytes <= 0 {
		t.Errorf("got %+v", u)
	}
	if h := u.Agent; h.Version != "1.2.3" || h.Detached != 1 || h.ResidentBytes <= 0 || h.Containment != proto.ContainmentProcessGroup {
		t.Errorf("got %+v", h)
	}
}
