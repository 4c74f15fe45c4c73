package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// actsAsWorld makes the test binary the world: every host on the internet, in a network namespace of its own. It is the
// directory that its web servers serve, or empty.
const actsAsWorld = "FORKVM_TEST_AS_WORLD"

// Where the world's own servers are; it answers for all other addresses, too. The host is this machine's end of the link.
const (
	worldAddress  = "93.184.216.34"
	worldAddress6 = "2600:9000::34"
	hostAddress   = "93.184.216.1"
	hostAddress6  = "2600:9000::1"
)

// world is the world as the test sees it.
type world struct {
	t     *testing.T
	stdin io.Writer
	lines chan string // of what it says
	seen  []string
}

// saw returns what has reached the world so far, each different packet once: "tcp ADDRESS:PORT", "dns ADDRESS NAME", …
func (w *world) saw() []string {
	w.t.Helper()
	fmt.Fprintln(w.stdin, "saw")
	for {
		line, ok := <-w.lines
		if !ok {
			w.t.Fatal("the world has ended")
		}
		if line == endOfSeen {
			return w.seen
		}
		w.seen = append(w.seen, line)
	}
}

// forget begins anew with what has reached the world.
func (w *world) forget() {
	w.saw()
	fmt.Fprintln(w.stdin, "forget")
	w.seen = nil
}

// What the world says beside what it sees.
const (
	worldReady = "ready"
	endOfSeen  = "end"
)

// startWorld connects this machine to a world: packets to everywhere go there, and the machine's resolver is one of it.
func startWorld(t *testing.T) *world { return startWorldWith(t, "") }

// startWorldWith is startWorld for a world whose web servers have the files of a directory, if there is one. Their certificate
// is put there.
func startWorldWith(t *testing.T, files string) *world {
	t.Helper()
	testkit.RequireKVM(t)
	if !testkit.InLab() {
		t.Skip("changes the machine's routes and resolver: it is for the lab")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), actsAsWorld+"="+files)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, stdin: stdin, lines: make(chan string, 1024)}
	var reader sync.WaitGroup
	reader.Go(func() {
		defer close(w.lines)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			w.lines <- lines.Text()
		}
	})
	t.Cleanup(func() {
		stdin.Close() // the world ends with it, and the link with the world
		for range w.lines {
		}
		reader.Wait()
		cmd.Wait()
	})
	w.connect(cmd.Process.Pid)
	return w
}

// connect lays the link between this machine and the world, and makes it the way to everywhere.
func (w *world) connect(pid int) {
	t := w.t
	ip := func(args ...string) {
		t.Helper()
		if err := busyboxIP(args...); err != nil {
			t.Fatal(err)
		}
	}
	ip("link", "add", "toworld", "type", "veth")
	peer := otherVeth(t)
	ip("link", "set", peer, "netns", fmt.Sprint(pid))
	replaceFile(t, "/proc/sys/net/ipv6/conf/toworld/accept_dad", "0")
	ip("addr", "add", hostAddress+"/24", "dev", "toworld")
	ip("link", "set", "toworld", "up")
	ip("-6", "addr", "add", hostAddress6+"/64", "dev", "toworld")
	fmt.Fprintln(w.stdin, peer)
	select {
	case line := <-w.lines:
		if line != worldReady {
			t.Fatalf("the world says %q", line)
		}
	case <-time.After(patience):
		t.Fatal("the world does not answer")
	}
	ip("route", "add", "default", "via", worldAddress)
	ip("-6", "route", "add", "default", "via", worldAddress6)
	replaceFile(t, "/etc/resolv.conf", "nameserver "+worldAddress+"\n")
	// Every program may send echo requests.
	replaceFile(t, "/proc/sys/net/ipv4/ping_group_range", "0 2147483647")
}

func busyboxIP(args ...string) error {
	if out, err := exec.Command("busybox", append([]string{"ip"}, args...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// otherVeth is the name that the kernel has given the other end of the link.
func otherVeth(t *testing.T) string {
	entries, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "veth") {
			return e.Name()
		}
	}
	t.Fatal("the link has no other end")
	return ""
}

// replaceFile writes a file until the test ends.
func replaceFile(t *testing.T, path, content string) {
	t.Helper()
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.WriteFile(path, before, 0o644) }) // not if it has gone
}

// eventually looks again and again, with a little time between. How often bounds it: time is counted where this runs.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 60 {
		if done() {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}
