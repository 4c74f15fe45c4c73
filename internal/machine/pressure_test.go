package machine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/store"
)

// TestCaseE8: a machine whose guest has written nearly all of its memory is frozen
// twice, and cloned, in a control group that has 128 MiB more than the guest, and no
// swap space. The machine's memory is in its layer or its own, not in both. The long
// run also stores it on a disk that takes 50 MB a second, and has machine and clone
// write on.
func TestCaseE8(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	ram, clones := uint64(320<<20), 3
	if !testing.Short() {
		ram, clones = 1<<30, 20
	}
	g := testkit.EnterGroup(t)
	m := bootDisk(t, ctx, ram)
	g.Write("memory.max", strconv.FormatUint(ram+128<<20, 10))
	// All but what the kernel needs.
	fill := strconv.FormatUint(ram>>20-110, 10)
	run(t, ctx, m, "mount -o remount,size=100% /dev/shm; dd if=/dev/urandom of=/run/some bs=1M count=1 2>/dev/null; "+
		"(while cat /run/some; do :; done) 2>/dev/null | dd of=/dev/shm/x bs=1M count="+fill+" iflag=fullblock 2>/dev/null; cat /dev/vda >/dev/null")
	full := take(t, m)
	run(t, ctx, m, "dd if=/dev/urandom of=/dev/shm/x bs=1M count=20 conv=notrunc 2>/dev/null")
	diff := take(t, m)
	t.Logf("%d pages, then %d; paused for %v, %v", full.Memory[0].Stored(), diff.Memory[len(diff.Memory)-1].Stored(), full.Pause, diff.Pause)
	if !testing.Short() {
		slowDisk(t, g, "/tmp", 50_000_000)
		storeCheckpoint(t, ctx, diff)
	}
	before := g.Stat("anon") + g.Stat("shmem")
	if !testing.Short() {
		// What clones write is theirs, and not in what the source was promised.
		g.Write("memory.max", strconv.FormatUint(ram+128<<20+uint64(clones)*idleMemory, 10))
	}
	var clone *Machine
	for range clones {
		clone = cloneOf(t, ctx, diff)
		run(t, ctx, clone, "true")
	}
	if grown := g.Stat("anon") + g.Stat("shmem") - before; grown > uint64(clones)*ram/10 {
		t.Errorf("%d idle clones take %d MiB", clones, grown>>20)
	}
	for _, m := range []*Machine{m, clone} {
		run(t, ctx, m, "dd if=/dev/urandom of=/dev/shm/x bs=1M count=20 conv=notrunc 2>/dev/null")
	}
	if n := g.Event("oom_kill"); n != 0 {
		t.Errorf("%d processes were killed", n)
	}
	t.Logf("%d MiB at most, %d MiB for %d clones", g.Number("memory.peak")>>20, (g.Stat("anon")+g.Stat("shmem")-before)>>20, clones)
}

// slowDisk limits what the group writes to the disk below a directory, in bytes a
// second.
func slowDisk(t *testing.T, g *testkit.Group, dir string, rate uint64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(g.Path), "cgroup.subtree_control"), []byte("+io"), 0); err != nil {
		t.Fatal("no io controller of cgroup v2: ", err)
	}
	g.Write("io.max", fmt.Sprintf("%d:%d wbps=%d", unix.Major(st.Dev), unix.Minor(st.Dev), rate))
}

// storeCheckpoint stores a checkpoint as a snapshot, on the disk that has /tmp.
func storeCheckpoint(t *testing.T, ctx context.Context, c *Checkpoint) {
	t.Helper()
	st, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	begun := time.Now()
	if _, err := c.Store(ctx, st, Label{Name: "stored"}); err != nil {
		t.Fatal(err)
	}
	t.Logf("stored in %v", time.Since(begun))
}
