package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

// What every guest, and so every snapshot, pays for its agent.
const (
	maxBinary = 6 << 20
	maxIdle   = 8 << 20 // resident
	maxGrowth = 8 << 20 // resident, with 200 commands that do nothing and one that nobody reads
	maxRested = 4 << 20 // resident, with 1,000 lines to it, each of which has asked once
)

func build(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "forkvm-agent")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=test", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return path
}

func resident(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		var kib int
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

func TestFootprint(t *testing.T) {
	path := build(t)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("binary: %d KiB", info.Size()>>10)
	if info.Size() > maxBinary {
		t.Errorf("binary has %d bytes, at most %d are allowed", info.Size(), maxBinary)
	}
	socket := filepath.Join(t.TempDir(), "s")
	cmd := exec.Command(path, "serve", "--listen", "unix:"+socket)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	c := client.New(client.Config{Dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ready, err := c.WaitReady(ctx)
	if err != nil || ready.Version != "test" {
		t.Fatalf("got %+v, %v", ready, err)
	}
	for range 20 {
		if r, err := c.Exec(ctx, client.Command{Args: []string{"echo", "ok"}, Stdout: io.Discard}); err != nil || r.ExitCode != 0 {
			t.Fatalf("got %+v, %v", r, err)
		}
	}
	idle := resident(t, cmd.Process.Pid)
	t.Logf("idle: %d KiB", idle>>10)
	if idle > maxIdle {
		t.Errorf("%d KiB resident after 20 commands, at most %d are allowed", idle>>10, maxIdle>>10)
	}
	ask(t, ctx, c, 1000)
	rested := resident(t, cmd.Process.Pid)
	t.Logf("with 1000 lines at rest: %d KiB more", (rested-idle)>>10)
	if rested-idle > maxRested {
		t.Errorf("1000 lines at rest need %d KiB, at most %d are allowed", (rested-idle)>>10, maxRested>>10)
	}
	busy(t, ctx, c)
	grown := resident(t, cmd.Process.Pid) - rested
	t.Logf("with 201 commands: %d KiB more", grown>>10)
	if grown > maxGrowth {
		t.Errorf("201 commands need %d KiB, at most %d are allowed", grown>>10, maxGrowth>>10)
	}
}

// ask asks once on each of so many lines, which stay.
func ask(t *testing.T, ctx context.Context, c *client.Client, lines int) {
	t.Helper()
	for range lines {
		line := c.Line()
		t.Cleanup(func() { line.Close() })
		if _, err := line.Ping(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// busy starts commands that stay until the test's context ends.
func busy(t *testing.T, ctx context.Context, c *client.Client) {
	t.Helper()
	commands := []client.Command{{Args: []string{"yes"}, Stdout: stuck{ctx}}}
	for range 200 {
		commands = append(commands, client.Command{Args: []string{"sleep", "300"}, Stdout: io.Discard, Stderr: io.Discard})
	}
	for _, cmd := range commands {
		if _, err := c.Start(ctx, cmd); err != nil {
			t.Fatal(err)
		}
	}
	for {
		info, err := c.Ping(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if info.Operations >= len(commands) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// stuck is a Writer that takes nothing until its context ends.
type stuck struct{ ctx context.Context }

func (s stuck) Write(p []byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

func TestParse(t *testing.T) {
	tests := []struct {
		args string
		want options
		ok   bool
	}{
		{"serve", options{listen: fmt.Sprint("vsock:", proto.Port)}, true},
		{"serve --guest", options{listen: fmt.Sprint("vsock:", proto.Port), guest: true}, true},
		{"serve --listen unix:/run/s", options{listen: "unix:/run/s"}, true},
		{"serve --listen", options{}, false},
		{"serve extra", options{}, false},
		{"", options{}, false},
	}
	for _, tt := range tests {
		o, err := parse(strings.Fields(tt.args))
		if (err == nil) != tt.ok || tt.ok && o != tt.want {
			t.Errorf("%q: got %+v, %v", tt.args, o, err)
		}
	}
	for _, bad := range []string{"tcp:1", "vsock:x", "vsock:99999999999", ""} {
		if l, err := listen(bad); err == nil {
			l.Close()
			t.Errorf("listens on %q", bad)
		}
	}
}

func TestVersion(t *testing.T) {
	out, err := exec.Command(build(t), "version").Output()
	if err != nil || !bytes.Equal(out, []byte("forkvm-agent test\n")) {
		t.Errorf("got %q, %v", out, err)
	}
}
