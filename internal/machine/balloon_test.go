package machine

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/vmm/memory"
)

// bootDisk boots the guest with a disk.
func bootDisk(t *testing.T, ctx context.Context, bytes uint64) *Machine {
	t.Helper()
	return bootSize(t, ctx, Size{CPUs: 1, MemoryBytes: bytes})
}

func bootSize(t *testing.T, ctx context.Context, size Size) *Machine {
	t.Helper()
	id := NewIdentity("source", TimeHost)
	m := buildDisk(t, size, id)
	if err := m.Bring(ctx, id); err != nil {
		t.Fatal(err)
	}
	return m
}

// buildDisk makes the same machine, which has not begun.
func buildDisk(t *testing.T, size Size, id Identity) *Machine {
	t.Helper()
	img, err := image.Open(filepath.Join(testkit.RequireGuest(t), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, kernel, err := FromImage(img, "disk", size)
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Kernel: kernel}
	checkpoint.Configure(&c)
	return build(t, c, id)
}

// cloneOf starts a machine from a checkpoint.
func cloneOf(t *testing.T, ctx context.Context, c *Checkpoint) *Machine {
	t.Helper()
	id := NewIdentity("clone", TimeHost)
	m := clone(t, c, id)
	bring(t, ctx, m, id)
	return m
}

// privatePages counts the pages that the host keeps for this machine alone.
func privatePages(t *testing.T, m *Machine) (pages int) {
	t.Helper()
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	extents, err := m.memory.Private()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	for _, e := range extents {
		pages += int(e.Count)
	}
	return pages
}

// await polls until done says yes.
func await(t *testing.T, ctx context.Context, what string, done func() bool) {
	t.Helper()
	for !done() {
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// TestFreedMemoryIsGivenBack: what a guest has written and freed is, soon after,
// neither private to its machine nor in a checkpoint.
func TestFreedMemoryIsGivenBack(t *testing.T) {
	testkit.Long(t)
	testkit.RequireKVM(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	m := bootDisk(t, ctx, 256<<20)
	const pages = 64 << 20 / memory.PageSize
	run(t, ctx, m, "tr '\\000' x </dev/zero | dd of=/dev/shm/x bs=1M count=64 iflag=fullblock 2>/dev/null")
	used := privatePages(t, m)
	if used < pages {
		t.Fatalf("the guest has written %d pages, %d are private", pages, used)
	}
	run(t, ctx, m, "rm /dev/shm/x")
	// Linux reports blocks of 2 MiB and more; of what lies scattered nothing comes.
	left := used
	for range 60 {
		if left = privatePages(t, m); left < used-pages*2/3 {
			break
		}
		time.Sleep(500 * time.Millisecond)
	}
	c := take(t, m)
	stored := c.Memory[len(c.Memory)-1].Stored()
	t.Logf("%d pages private, %d after %d were freed and %d MiB reported, %d stored", used, left, pages, m.balloon.Stats().Reported>>20, stored)
	if left > used-pages*2/3 || stored > uint64(left) {
		t.Error("free pages are not given back")
	}
}

// TestCaseE6 inflates the balloon before a snapshot, and inflates and deflates it
// in a clone while the guest fills and checks patterns; another snapshot is taken
// in the middle.
func TestCaseE6(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	rounds := 10
	if !testing.Short() {
		rounds = 60
	}
	const ram = 256 << 20
	m := bootDisk(t, ctx, ram)
	run(t, ctx, m, "tr '\\000' x </dev/zero | dd of=/dev/shm/x bs=1M count=100 iflag=fullblock 2>/dev/null; rm /dev/shm/x; dd if=/dev/urandom of=/dev/shm/a bs=1M count=8 2>/dev/null; sha256sum </dev/shm/a >/dev/shm/sum")
	const inflated = ram / 2 / memory.PageSize
	m.balloon.SetTarget(inflated)
	await(t, ctx, "the balloon is not filled", func() bool { return m.balloon.Stats().Inflated >= inflated })
	if private := privatePages(t, m); private > ram/memory.PageSize-inflated*9/10 {
		t.Errorf("%d pages are private with %d of %d in the balloon", private, inflated, ram/memory.PageSize)
	}
	const check = "sha256sum </dev/shm/a | cmp - /dev/shm/sum"
	first := cloneOf(t, ctx, take(t, m))
	run(t, ctx, first, check)
	// Fills fresh memory and looks whether it stays what it is, and whether new
	// pages are zeros, which no kernel but ours would have to make them.
	run(t, ctx, first, `cat >/root/fill <<'END'
while [ ! -e /root/stop ]; do
  cp /dev/shm/a /dev/shm/b && sha256sum </dev/shm/b | cmp - /dev/shm/sum || exit 1
  rm /dev/shm/b
  dd if=/dev/zero of=/dev/shm/z bs=1M count=8 2>/dev/null
  tr -d '\000' </dev/shm/z | cmp - /dev/null || exit 1
  echo >>/root/rounds
done
echo fine >/root/end
END
setsid sh /root/fill >/root/log 2>&1 & true`)
	var middle *Machine
	for round := range rounds {
		goal := uint32(inflated)
		if round%2 == 0 {
			goal -= 40 << 20 / memory.PageSize
		}
		first.balloon.SetTarget(goal)
		for range 20 { // each way takes the guest a while
			if s := first.balloon.Stats(); inflated+s.Inflated-s.Deflated == uint64(goal) {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if round == rounds/2 {
			middle = cloneOf(t, ctx, take(t, first))
		}
	}
	for name, m := range map[string]*Machine{"first generation": first, "second generation": middle} {
		m.balloon.SetTarget(0)
		run(t, ctx, m, "touch /root/stop; "+check)
		await(t, ctx, name+" does not end", func() bool {
			return run(t, ctx, m, "cat /root/end /root/log 2>/dev/null; true") != ""
		})
		t.Logf("%s: %s rounds, %+v", name, run(t, ctx, m, "wc -l </root/rounds"), m.balloon.Stats())
		if end := run(t, ctx, m, "cat /root/end /root/log 2>/dev/null; true"); end != "fine" {
			t.Errorf("%s: %s", name, end)
		}
	}
	if first.balloon.Stats().Deflated == 0 {
		t.Error("nothing was deflated")
	}
}
