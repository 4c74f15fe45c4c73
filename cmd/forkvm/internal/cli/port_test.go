package cli

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/vmm"
)

func TestParseDoor(t *testing.T) {
	for spec, want := range map[string]door{
		"80":                 {"tcp", "127.0.0.1:0", "tcp", ":80", "80"},
		"8080:80":            {"tcp", "127.0.0.1:8080", "tcp", ":80", "80"},
		"0.0.0.0:8080:80":    {"tcp", "0.0.0.0:8080", "tcp", ":80", "80"},
		"0.0.0.0:80":         {"tcp", "0.0.0.0:0", "tcp", ":80", "80"},
		"[::1]:80":           {"tcp", "[::1]:0", "tcp", ":80", "80"},
		"[::1]:8080:80":      {"tcp", "[::1]:8080", "tcp", ":80", "80"},
		"/run/x.sock":        {"tcp", "127.0.0.1:0", "unix", "/run/x.sock", "/run/x.sock"},
		"8080:/run/x:y":      {"tcp", "127.0.0.1:8080", "unix", "/run/x:y", "/run/x:y"},
		"./here.sock:80":     {"unix", "./here.sock", "tcp", ":80", "80"},
		"/here.sock:/there":  {"unix", "/here.sock", "unix", "/there", "/there"},
		"127.0.0.1:9:/there": {"tcp", "127.0.0.1:9", "unix", "/there", "/there"},
	} {
		if got, err := parseDoor(spec); err != nil || got != want {
			t.Errorf("%s: got %+v, %v", spec, got, err)
		}
	}
}

// lines is a Writer that another goroutine reads.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) wait(t *testing.T, n int) []string {
	t.Helper()
	for range 1000 {
		l.mu.Lock()
		got := strings.Split(strings.TrimSpace(l.text.String()), "\n")
		l.mu.Unlock()
		if len(got) == n && got[0] != "" {
			return got
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("no %d lines", n)
	return nil
}

func TestPortForwardsUntilTheVMEnds(t *testing.T) {
	s := newSession(t)
	path := filepath.Join(t.TempDir(), "door.sock")
	out := &lines{}
	e := s.env
	e.Stdout, e.Stderr = out, io.Discard
	code := make(chan int, 1)
	go func() {
		code <- Main(context.Background(), e, []string{"--config", "/dev/null", "port", "alpha", "5432", path + ":/run/x"})
	}()
	addresses := out.wait(t, 2)
	if addresses[1] != path {
		t.Errorf("addresses %q", addresses)
	}
	for at, want := range map[string]string{addresses[0]: "tcp :5432 of alpha\n", path: "unix /run/x of alpha\n"} {
		network := "tcp"
		if at == path {
			network = "unix"
		}
		conn, err := net.Dial(network, at)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(conn); err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v", at, got, err)
		}
		conn.Close()
	}
	vm := s.node.vms[0]
	vm.end(vmm.ReasonShutdown)
	if got := <-code; got != 0 {
		t.Errorf("exit code %d", got)
	}
	if _, err := net.Dial("unix", path); err == nil {
		t.Error("it goes on")
	}
}

func TestPortFailsAsAWhole(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	_, stderr, code := newSession(t).run("port", "alpha", "80", port+":80")
	if code != exitFailure || !strings.Contains(stderr, "address already in use") {
		t.Errorf("exit code %d, %q", code, stderr)
	}
}
