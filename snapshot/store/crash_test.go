package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// script is the steps seen so far and what happens at one of them.
type script struct {
	steps []string
	at    int // index of the step that fails; -1: none
	crash bool
	err   error
}

// crashed is panicked with when the process is to die.
type crashed struct{}

func (s *script) before(step, file string) error {
	s.steps = append(s.steps, strings.TrimSpace(step+" "+file))
	if len(s.steps)-1 != s.at {
		return nil
	}
	if s.crash {
		panic(crashed{})
	}
	return s.err
}

// attempt publishes under a script. A crash leaves everything as a dead
// process would: no clean-up, the lock gone.
func attempt(t *testing.T, root string, m *machine, sc *script) (err error) {
	t.Helper()
	s, err := OpenWith(Config{Path: root, Before: sc.before})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var w *Writer
	defer func() {
		r := recover()
		if _, ok := r.(crashed); !ok && r != nil {
			panic(r)
		}
		if r != nil {
			err = errors.New("crashed")
			if w != nil && w.pending != nil {
				w.pending.close()
			}
		}
	}()
	if w, err = s.Create("new"); err != nil {
		return err
	}
	p := w.pending
	defer func() { // a crash in Commit, which has let go of it already
		if r := recover(); r != nil {
			p.close()
			panic(r)
		}
	}()
	manifest, err := m.fill(context.Background(), w)
	if err != nil {
		return errors.Join(err, w.Abort())
	}
	return w.Commit(manifest)
}

// baseAndMachine makes a store with an old snapshot and a machine that grew
// from it, so that publishing both links and copies.
func baseAndMachine(t *testing.T) (root string, m *machine) {
	root = t.TempDir()
	s := openStore(t, root)
	old := newMachine(t)
	publish(t, s, old, "old")
	snap, err := s.Open("old")
	if err != nil {
		t.Fatal(err)
	}
	m = &machine{memory: snap.Memory, disk: snap.Disks[0].Layers}
	t.Cleanup(func() { m.close() })
	if err := m.grow(7); err != nil {
		t.Fatal(err)
	}
	return root, m
}

// The order that makes a listed snapshot a durable one.
func TestOrderOfPublishing(t *testing.T) {
	root, m := baseAndMachine(t)
	sc := &script{at: -1}
	if err := attempt(t, root, m, sc); err != nil {
		t.Fatal(err)
	}
	linked := []string{m.memory[0].ID(), m.disk[0].ID()}
	copied := []string{m.memory[1].ID(), m.disk[1].ID()}
	want := []string{
		"create",
		"link memory-" + linked[0] + ".layer",
		"write memory-" + copied[0] + ".layer", "sync memory-" + copied[0] + ".layer",
		"link disk-blk0-" + linked[1] + ".layer",
		"write disk-blk0-" + copied[1] + ".layer", "sync disk-blk0-" + copied[1] + ".layer",
		"write state", "sync state",
		"write manifest.json", "sync manifest.json",
		"sync directory", "rename", "sync parent",
	}
	if !slices.Equal(sc.steps, want) {
		t.Errorf("steps:\n%s\nwant:\n%s", strings.Join(sc.steps, "\n"), strings.Join(want, "\n"))
	}
}

// G1: the process dies, or the host fails, before each step in turn. Only
// complete snapshots are ever listed, the older one stays good, and nothing is
// left over.
func TestEachStepG1(t *testing.T) {
	for _, crash := range []bool{true, false} {
		for at := 0; ; at++ {
			root, m := baseAndMachine(t)
			sc := &script{at: at, crash: crash, err: unix.EIO}
			err := attempt(t, root, m, sc)
			if len(sc.steps) <= at {
				if err != nil {
					t.Fatal(err)
				}
				break // past the last step
			}
			step := sc.steps[at]
			t.Run(fmt.Sprintf("crash=%v/%d %s", crash, at, strings.Fields(step)[0]), func(t *testing.T) {
				if err == nil {
					t.Fatal("no error")
				}
				if !crash && !errors.Is(err, unix.EIO) {
					t.Errorf("errno lost: %v", err)
				}
				s := openStore(t, root)
				want := []string{"old"}
				if crash && step == "sync parent" {
					want = []string{"new", "old"} // renamed, and complete
				}
				expectNames(t, s, want...)
				// What failed can be done again.
				if !slices.Contains(want, "new") {
					publish(t, s, m, "new")
				}
				expectNames(t, s, "new", "old")
			})
		}
	}
}

// publishForever is the process that is killed.
func publishForever(root string) {
	fail := func(err error) {
		fmt.Println(err)
		os.Exit(1)
	}
	s, err := Open(root)
	if err != nil {
		fail(err)
	}
	m := &machine{}
	if err := m.grow(uint64(1 + rand.IntN(200))); err != nil {
		fail(err)
	}
	for i := 0; ; i++ {
		name := fmt.Sprintf("s-%d-%d", os.Getpid(), i)
		if err := m.publish(s, name); err != nil {
			fail(err)
		}
		if i == 0 {
			fmt.Println("ready")
		}
		if i > 1 {
			if err := s.Remove(fmt.Sprintf("s-%d-%d", os.Getpid(), i-2)); err != nil {
				fail(err)
			}
		}
	}
}

// G1: kill -9 at random moments while snapshots are made and removed.
func TestKilledWriterG1(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	rounds := 40
	if testing.Short() {
		rounds = 5
	}
	root := t.TempDir()
	leftovers := 0
	for range rounds {
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), "FORKVM_TEST_PUBLISH_IN="+root)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line, _ := bufio.NewReader(out).ReadString('\n')
		time.Sleep(time.Duration(rand.Int64N(int64(20 * time.Millisecond))))
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if line != "ready\n" {
			t.Fatalf("child said %q", line)
		}
		if left, _ := os.ReadDir(filepath.Join(root, "tmp")); len(left) > 0 {
			leftovers++
		}
		s, err := Open(root)
		if err != nil {
			t.Fatal(err)
		}
		names := checkStore(t, s)
		if len(names) == 0 {
			t.Error("nothing is listed after a snapshot was made")
		}
		for _, name := range names {
			if err := s.Remove(name); err != nil {
				t.Error(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of %d kills left something half-made", leftovers, rounds)
}

// G1, C5: the host's disk is full at different points of a snapshot.
func TestDiskFullG1(t *testing.T) {
	root := t.TempDir()
	if err := unix.Mount("forkvm-test", root, "tmpfs", 0, "size=4m"); err != nil {
		t.Skipf("mount a small tmpfs: %v: run the test as root, or in `unshare -rm`", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s := openStore(t, filepath.Join(root, "store"))
	old := newMachine(t)
	publish(t, s, old, "old")
	m := &machine{}
	t.Cleanup(func() { m.close() })
	if err := m.grow(200); err != nil { // 800 KiB of memory and of disk
		t.Fatal(err)
	}
	ballast := filepath.Join(root, "ballast")
	for _, percent := range []int{0, 30, 60, 99} {
		if err := fillUntil(ballast, root, int64(1620<<10*percent/100)); err != nil {
			t.Fatal(err)
		}
		if err := m.publish(s, "new"); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%d %%: %v", percent, err)
		}
		expectNames(t, s, "old")
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
	}
	publish(t, s, m, "new")
	expectNames(t, s, "new", "old")
}

// fillUntil writes a file until free bytes are left.
func fillUntil(path, root string, free int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	page := make([]byte, 4096)
	for {
		var st unix.Statfs_t
		if err := unix.Statfs(root, &st); err != nil {
			return err
		}
		if int64(st.Bavail)*st.Bsize <= free {
			return nil
		}
		if _, err := f.Write(page); errors.Is(err, unix.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
