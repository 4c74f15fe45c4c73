package machine

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/vmm/memory"
)

// judgement is a guest under load, compared step by step with what its
// checkpoints say.
type judgement struct {
	t      *testing.T
	ctx    context.Context
	source *Machine
	before contents
	depth  int // how many layers memory had then
}

// load is what the guest does all the time: computing, patterns in memory and
// files on the disk that it checks itself, an echo on vsock, random numbers from
// the device into a known file, and memory taken and freed for the balloon.
const load = `mkdir -p /var/tmp/load
setsid /root/guestload -dir /var/tmp/load -memory 8 >/root/load.log 2>&1 &
(while :; do dd if=/dev/hwrng of=/dev/shm/random bs=4k count=4; sleep 0.1; done) >/dev/null 2>&1 &
(while :; do dd if=/dev/urandom of=/dev/shm/big bs=64k count=60; cat /dev/vda >/dev/null; rm /dev/shm/big; sleep 0.2; done) >/dev/null 2>&1 & true`

func newJudgement(t *testing.T, ctx context.Context, ram uint64) *judgement {
	j := &judgement{t: t, ctx: ctx, source: bootDisk(t, ctx, ram)}
	program, err := os.Open(filepath.Join(testkit.RequireGuest(t), "guestload"))
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if _, err := j.source.Agent().Put(ctx, client.File{Path: "/root/guestload", Mode: 0o755}, program); err != nil {
		t.Fatal(err)
	}
	run(t, ctx, j.source, load)
	await(t, ctx, "guestload does not listen", func() bool {
		conn, err := j.source.Dial(ctx, 7000)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return j
}

// echo has the guest receive on vsock and send it back.
func (j *judgement) echo() {
	j.t.Helper()
	conn, err := j.source.Dial(j.ctx, 7000)
	if err != nil {
		j.t.Fatal(err)
	}
	defer conn.Close()
	sent := make([]byte, 16<<10)
	for i := range sent {
		sent[i] = byte(rand.Uint32())
	}
	go conn.Write(sent)
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, sent) {
		j.t.Errorf("echo: %v", err)
	}
}

// step pauses the guest, dumps its memory and its disk in full, takes a checkpoint
// in the same pause, and compares page by page and block by block.
func (j *judgement) step(name string) {
	j.t.Helper()
	m := j.source
	if err := m.Pause(); err != nil {
		j.t.Fatal(err)
	}
	ram, disk := ramOf(j.t, m), diskOf(j.t, m)
	private, err := m.memory.Private()
	if err != nil {
		j.t.Fatal(err)
	}
	dirty := uint64(0)
	for _, e := range private {
		dirty += e.Count
	}
	c := take(j.t, m)
	if err := m.Resume(); err != nil {
		j.t.Fatal(err)
	}
	laidOver(j.t, c.Memory, int64(m.Shape().MemoryBytes)).compare(j.t, name+": memory layers", ram)
	laidOver(j.t, c.Disks[0], m.Shape().Disks[0].Size).compare(j.t, name+": disk layers", disk)
	stored := uint64(0)
	if len(c.Memory) > 0 {
		stored = c.Memory[len(c.Memory)-1].Stored()
	}
	j.t.Logf("%s: %d pages written, %d stored, %d differ from the step before; paused for %v", name, dirty, stored, len(ram.differing(j.before)), c.Pause)
	// Where the stack has not grown, the newest layer is a merger of this step's with those of others.
	if stored > dirty+dirty/20 && len(c.Memory) > j.depth {
		j.t.Errorf("%s: %d pages are stored of %d written", name, stored, dirty)
	}
	j.before, j.depth = ram, len(c.Memory)
	if err := c.Close(); err != nil {
		j.t.Error(err)
	}
}

// end checks that the guest has noticed nothing.
func (j *judgement) end() {
	j.t.Helper()
	if log := run(j.t, j.ctx, j.source, "cat /root/load.log; pidof guestload >/dev/null || echo guestload is gone"); log != "" {
		j.t.Errorf("the guest says: %s", log)
	}
}

// random lets the guest go on for a random time, with something from the host's
// side, and balloon that comes and goes.
func (j *judgement) random(r *rand.Rand) {
	j.echo()
	if r.IntN(3) == 0 {
		j.source.balloon.SetTarget(uint32(r.IntN(32<<20)) / memory.PageSize)
	}
	time.Sleep(time.Duration(r.IntN(400)) * time.Millisecond)
}

// TestCaseE1 compares checkpoints of a guest under load with full dumps of its
// memory and its disk, taken independently in the same pause.
func TestCaseE1(t *testing.T) {
	testkit.Long(t)
	testkit.RequireKVM(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	j := newJudgement(t, ctx, judgeMemory)
	r := rand.New(rand.NewPCG(1, 1))
	for step := range 6 {
		j.random(r)
		j.step(fmt.Sprintf("step %d", step))
	}
	j.end()
}

// TestCaseE1Long does it at fifty steps, with guests of one and two regions of
// RAM, and with half of the machine's memory swapped out.
func TestCaseE1Long(t *testing.T) {
	testkit.Long(t)
	testkit.RequireKVM(t)
	testkit.NoLeaks(t)
	for _, c := range []struct {
		name  string
		ram   uint64
		steps int
		swap  bool
	}{
		{"50 steps", judgeMemory, 50, false},
		{"1 GiB", 1 << 30, 5, false},
		{"two regions", 4 << 30, 5, false},
		{"swapped", judgeMemory, 10, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			var g *testkit.Group
			if c.swap {
				g = testkit.EnterGroup(t)
				swapOn(t)
			}
			j := newJudgement(t, ctx, c.ram)
			if c.swap {
				swapHalf(t, g)
			}
			r := rand.New(rand.NewPCG(1, c.ram))
			for step := range c.steps {
				j.random(r)
				j.step(fmt.Sprintf("step %d", step))
			}
			j.end()
		})
	}
}

// swapSpace in bytes is for what a step leaves in layers, too, for each of all steps.
const swapSpace = 2 << 30

// swapOn gives the machine a file to swap to.
func swapOn(t *testing.T) {
	t.Helper()
	testkit.RequireRoot(t)
	file := filepath.Join(t.TempDir(), "swap")
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, swapSpace); err != nil {
		t.Fatal(err)
	}
	for _, command := range [][]string{{"mkswap", file}, {"swapon", file}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", command, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("swapoff", file).CombinedOutput(); err != nil {
			t.Errorf("swapoff: %v: %s", err, out)
		}
	})
}

// swapHalf limits the group to half of what it uses now that is no page cache.
func swapHalf(t *testing.T, g *testkit.Group) {
	t.Helper()
	used := g.Stat("anon") + g.Stat("shmem")
	g.Write("memory.max", strconv.FormatUint(used/2, 10))
	t.Cleanup(func() { g.Write("memory.max", "max") }) // or swapoff has no room
	swapped := g.Number("memory.swap.current")
	t.Logf("%d MiB of %d MiB are swapped out", swapped>>20, used>>20)
	if swapped < used/4 {
		t.Errorf("%d of %d bytes are swapped out", swapped, used)
	}
}
