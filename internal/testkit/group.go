package testkit

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Group is a control group below the root, with the memory controller.
type Group struct {
	Path string
	t    *testing.T
}

// EnterGroup moves this process into a group of its own until the end of the test.
// What it allocates from now on is charged to that group, and so is what processes
// allocate that it starts. That is for the lab: another machine's groups are not the
// test's, and may be laid out in any way.
func EnterGroup(t *testing.T) *Group {
	t.Helper()
	if !InLab() {
		missing(t, "lab", "needs control groups of its own: run it in the lab (make test-lab)")
	}
	const root = "/sys/fs/cgroup"
	if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory"), 0); err != nil {
		t.Fatal("no memory controller of cgroup v2: ", err)
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	old := filepath.Join(root, strings.TrimPrefix(strings.TrimSpace(string(text)), "0::"))
	path, err := os.MkdirTemp(root, "forkvm-test-")
	if err != nil {
		t.Fatal(err)
	}
	g := &Group{t: t, Path: path}
	g.move(path)
	t.Cleanup(func() {
		g.move(old)
		// A process that has ended leaves its group a little later.
		err := unix.Rmdir(path)
		for range 200 {
			if !errors.Is(err, unix.EBUSY) {
				break
			}
			time.Sleep(50 * time.Millisecond)
			err = unix.Rmdir(path)
		}
		if err != nil {
			t.Errorf("remove %s: %v", path, err)
		}
	})
	return g
}

func (g *Group) move(to string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		g.t.Error(err)
	}
}

// Write sets one of the group's files.
func (g *Group) Write(file, text string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(g.Path, file), []byte(text), 0); err != nil {
		g.t.Fatal(err)
	}
}

// Number reads one of the group's files that is a number.
func (g *Group) Number(file string) uint64 {
	g.t.Helper()
	return g.number(g.read(file))
}

// Stat is a line of memory.stat.
func (g *Group) Stat(name string) uint64 { return g.line("memory.stat", name) }

// Event is a line of memory.events.
func (g *Group) Event(name string) uint64 { return g.line("memory.events", name) }

func (g *Group) line(file, name string) uint64 {
	g.t.Helper()
	for line := range strings.Lines(g.read(file)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return g.number(value)
		}
	}
	g.t.Fatalf("%s has no %s", file, name)
	return 0
}

func (g *Group) read(file string) string {
	g.t.Helper()
	text, err := os.ReadFile(filepath.Join(g.Path, file))
	if err != nil {
		g.t.Fatal(err)
	}
	return string(text)
}

func (g *Group) number(text string) uint64 {
	g.t.Helper()
	n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 64)
	if err != nil {
		g.t.Fatal(err)
	}
	return n
}
