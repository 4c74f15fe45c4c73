package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/vmm/memory"
)

// pageSums are the SHA-256 sums of pages or blocks, the zero value for zeros.
type pageSums [][sha256.Size]byte

var zeros [memory.PageSize]byte

// Write takes whole pages, in order.
func (s *pageSums) Write(p []byte) (int, error) {
	for at := 0; at < len(p); at += memory.PageSize {
		*s = append(*s, sumPage(p[at:min(len(p), at+memory.PageSize)]))
	}
	return len(p), nil
}

func sumPage(page []byte) (sum [sha256.Size]byte) {
	if !bytes.Equal(page, zeros[:len(page)]) {
		sum = sha256.Sum256(page)
	}
	return sum
}

// layerSums reads a stack of layers in the plainest way there is.
func layerSums(t *testing.T, layers []*layer.Layer, units uint64) pageSums {
	t.Helper()
	sums := make(pageSums, units)
	for _, l := range layers {
		for _, e := range l.Extents() {
			for i := range min(e.Count, units-e.Start) {
				if e.Offset < 0 {
					sums[e.Start+i] = [sha256.Size]byte{}
					continue
				}
				var page [memory.PageSize]byte
				if _, err := l.File().ReadAt(page[:], e.Offset+int64(i*memory.PageSize)); err != nil && err != io.EOF {
					t.Fatal(err)
				}
				sums[e.Start+i] = sumPage(page[:])
			}
		}
	}
	return sums
}

// compare names the first pages that differ.
func (s pageSums) compare(t *testing.T, what string, want pageSums) {
	t.Helper()
	if len(s) != len(want) {
		t.Errorf("%s: %d pages, want %d", what, len(s), len(want))
		return
	}
	wrong := 0
	for n := range s {
		if s[n] != want[n] {
			if wrong++; wrong <= 5 {
				t.Errorf("%s: page %#x differs", what, n)
			}
		}
	}
	if wrong > 5 {
		t.Errorf("%s: %d pages differ", what, wrong)
	}
}

func (s pageSums) changed(before pageSums) (pages int) {
	for n := range before {
		if s[n] != before[n] {
			pages++
		}
	}
	return pages
}

// judgement is a guest under load, compared step by step with what its
// checkpoints say.
type judgement struct {
	t      *testing.T
	ctx    context.Context
	source *Machine
	before pageSums
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
	var ram, disk pageSums
	if err := m.memory.Dump(&ram); err != nil {
		j.t.Fatal(err)
	}
	flat := io.NewSectionReader(m.disks[0], 0, m.disks[0].Size())
	if _, err := io.CopyBuffer(struct{ io.Writer }{&disk}, struct{ io.Reader }{flat}, make([]byte, 256<<10)); err != nil {
		j.t.Fatal(err)
	}
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
	layerSums(j.t, c.Memory, uint64(len(ram))).compare(j.t, name+": memory layers", ram)
	layerSums(j.t, c.Disks[0], uint64(len(disk))).compare(j.t, name+": disk layers", disk)
	stored := uint64(0)
	if len(c.Memory) > 0 {
		stored = c.Memory[len(c.Memory)-1].Stored()
	}
	j.t.Logf("%s: %d pages written, %d stored, %d differ from the step before; paused for %v", name, dirty, stored, ram.changed(j.before), c.Pause)
	if stored > dirty+dirty/20 {
		j.t.Errorf("%s: %d pages are stored of %d written", name, stored, dirty)
	}
	j.before = ram
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
			var g *group
			if c.swap {
				g = enterGroup(t)
				swapOn(t)
			}
			j := newJudgement(t, ctx, c.ram)
			if c.swap {
				g.swapHalf()
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
	if err := unix.Fallocate(int(f.Fd()), 0, 0, 512<<20); err != nil {
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

// group is a control group below the root.
type group struct {
	t    *testing.T
	path string
}

// enterGroup moves this process into a group of its own until the end of the
// test. What it allocates from now on is charged to that group.
func enterGroup(t *testing.T) *group {
	t.Helper()
	testkit.RequireRoot(t)
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
	g := &group{t: t, path: path}
	g.move(path)
	t.Cleanup(func() {
		g.move(old)
		if err := unix.Rmdir(path); err != nil {
			t.Errorf("remove %s: %v", path, err)
		}
	})
	return g
}

// swapHalf limits the group to half of what it uses now that is no page cache.
func (g *group) swapHalf() {
	g.t.Helper()
	used := g.stat("anon") + g.stat("shmem")
	g.write("memory.max", strconv.FormatUint(used/2, 10))
	swapped := g.number("memory.swap.current")
	g.t.Logf("%d MiB of %d MiB are swapped out", swapped>>20, used>>20)
	if swapped < used/4 {
		g.t.Errorf("%d of %d bytes are swapped out", swapped, used)
	}
}

// stat is a line of memory.stat, event one of memory.events.
func (g *group) stat(name string) uint64  { return g.line("memory.stat", name) }
func (g *group) event(name string) uint64 { return g.line("memory.events", name) }

func (g *group) line(file, name string) uint64 {
	g.t.Helper()
	text, err := os.ReadFile(filepath.Join(g.path, file))
	if err != nil {
		g.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			if err != nil {
				g.t.Fatal(err)
			}
			return n
		}
	}
	g.t.Fatalf("%s has no %s", file, name)
	return 0
}

func (g *group) move(to string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		g.t.Error(err)
	}
}

func (g *group) write(file, text string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(g.path, file), []byte(text), 0); err != nil {
		g.t.Fatal(err)
	}
}

func (g *group) number(file string) uint64 {
	g.t.Helper()
	text, err := os.ReadFile(filepath.Join(g.path, file))
	if err != nil {
		g.t.Fatal(err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		g.t.Fatal(err)
	}
	return n
}
