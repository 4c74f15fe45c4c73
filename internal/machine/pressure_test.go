package machine

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// TestCaseE8: a machine whose guest has written nearly all of its memory is frozen
// twice, and cloned, in a control group that has 128 MiB more than the guest, and no
// swap space. The machine's memory is in its layer or its own, not in both.
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
	g := enterGroup(t)
	m := bootDisk(t, ctx, ram)
	g.write("memory.max", strconv.FormatUint(ram+128<<20, 10))
	// All but what the kernel needs.
	fill := strconv.FormatUint(ram>>20-110, 10)
	run(t, ctx, m, "mount -o remount,size=100% /dev/shm; tr '\\000' x </dev/zero | dd of=/dev/shm/x bs=1M count="+fill+" iflag=fullblock 2>/dev/null; cat /dev/vda >/dev/null")
	full := take(t, m)
	run(t, ctx, m, "dd if=/dev/urandom of=/dev/shm/x bs=1M count=20 conv=notrunc 2>/dev/null")
	diff := take(t, m)
	t.Logf("%d pages, then %d; paused for %v, %v", full.Memory[0].Stored(), diff.Memory[len(diff.Memory)-1].Stored(), full.Pause, diff.Pause)
	before := g.stat("anon") + g.stat("shmem")
	for range clones {
		run(t, ctx, cloneOf(t, ctx, diff), "true")
	}
	if grown := g.stat("anon") + g.stat("shmem") - before; grown > uint64(clones)*ram/10 {
		t.Errorf("%d idle clones take %d MiB", clones, grown>>20)
	}
	if n := g.event("oom_kill"); n != 0 {
		t.Errorf("%d processes were killed", n)
	}
	t.Logf("%d MiB at most, %d MiB for %d clones", g.number("memory.peak")>>20, (g.stat("anon")+g.stat("shmem")-before)>>20, clones)
}
