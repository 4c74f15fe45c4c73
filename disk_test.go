package forkvm_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
)

// topFiles opens the files without a name that machines of this process keep in
// a directory: the tops of their disks, in the order in which they were opened.
func topFiles(t *testing.T, dir string) []*os.File {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var tops []*os.File
	for _, e := range entries {
		path := filepath.Join("/proc/self/fd", e.Name())
		if target, err := os.Readlink(path); err != nil || !strings.HasPrefix(target, dir+"/#") {
			continue
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		tops = append(tops, f)
	}
	if len(tops) == 0 {
		t.Fatalf("no top layer in %s", dir)
	}
	return tops
}

// spaceOf is how much of the host's disk the files take.
func spaceOf(t *testing.T, files []*os.File) (bytes int64) {
	t.Helper()
	for _, f := range files {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		bytes += st.Blocks * 512
	}
	return bytes
}

func hashOpen(t *testing.T, files []*os.File) (sum [sha256.Size]byte) {
	t.Helper()
	h := sha256.New()
	for _, f := range files {
		if _, err := io.Copy(h, io.NewSectionReader(f, 0, 1<<62)); err != nil {
			t.Fatal(err)
		}
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// mountSmall mounts a file system of that size until the end of the test.
func mountSmall(t *testing.T, size string) string {
	t.Helper()
	testkit.RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("small", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// deleteAndTrim deletes the file that fill made. ext4 gives a deleted file's blocks
// back after the commit that deletes it is announced, in jbd2's commit callback,
// so a sync can return before them: a second commit begins after the callback of
// the first.
const deleteAndTrim = "rm /root/big; sync; touch /root/second-commit; sync; fstrim /"

// TestDiscardFreesTheTop has a guest delete a file and trim its file system:
// the host gets the space back, and a discard of what lies in a layer below
// shows as zeros.
func TestDiscardFreesTheTop(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	dir := mountSmall(t, "128m")
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "trimmer", TempDir: dir})
	tops := topFiles(t, dir)
	const written = 4 << 20
	fill := "head -c 4194304 /dev/urandom > /root/big; sync"
	sh(t, ctx, vm, fill)
	before := spaceOf(t, tops)
	if before < written {
		t.Fatalf("the top takes %d bytes after %d were written", before, written)
	}
	sh(t, ctx, vm, deleteAndTrim)
	trimmed := spaceOf(t, tops)
	if trimmed > before-written*9/10 {
		t.Errorf("the top takes %d bytes, and %d after a trim", before, trimmed)
	}
	sh(t, ctx, vm, fill)
	if again := spaceOf(t, tops); again > before+1<<20 {
		t.Errorf("the top takes %d bytes after the same was written again, %d the first time", again, before)
	}

	// Frozen, the blocks are in a layer that never changes.
	own := openStore(t)
	full := takeSnapshot(t, ctx, vm, own, "full")
	sh(t, ctx, vm, deleteAndTrim+"; echo 3 > /proc/sys/vm/drop_caches")
	m := takeSnapshot(t, ctx, vm, own, "trimmed")
	checkFilesystem(t, exportDisk(t, own, "trimmed"))
	last := m.Disks[0].Layers[len(m.Disks[0].Layers)-1]
	if last.Stored*4096 > written/2 {
		t.Errorf("the layer with the trim stores %d blocks", last.Stored)
	}
	// Nothing was written since: the stack does not grow.
	if err := vm.Pause(); err != nil {
		t.Fatal(err)
	}
	takeSnapshot(t, ctx, vm, own, "one")
	m = takeSnapshot(t, ctx, vm, own, "other")
	if one, err := own.Stat("one"); err != nil || len(one.Disks[0].Layers) != len(m.Disks[0].Layers) {
		t.Errorf("two snapshots of one state have stacks of %d and %d layers, %v", len(one.Disks[0].Layers), len(m.Disks[0].Layers), err)
	}
	if len(full.Disks[0].Layers) >= len(m.Disks[0].Layers) {
		t.Errorf("stacks of %d and %d layers", len(full.Disks[0].Layers), len(m.Disks[0].Layers))
	}
	again := restore(t, ctx, own, "full", forkvm.Config{Name: "again"})
	if size := sh(t, ctx, again, "stat -c %s /root/big"); size != fmt.Sprint(written) {
		t.Errorf("the older snapshot has a file of %s bytes", size)
	}
}

// traceSyncs counts the fdatasync calls of this process that have succeeded, by
// the host kernel's word. The function returned says how many there were.
func traceSyncs(t *testing.T) func() int {
	t.Helper()
	testkit.RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tracefs", dir, "tracefs", 0, ""); err != nil {
		testkit.Require(t, "tracefs", fmt.Sprintf("needs tracefs: %v", err))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	instance := filepath.Join(dir, "instances", "forkvm-test")
	if err := os.Mkdir(instance, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(instance); err != nil {
			t.Error(err)
		}
	})
	event := filepath.Join(instance, "events/syscalls/sys_exit_fdatasync/enable")
	if err := os.WriteFile(event, []byte("1"), 0); err != nil {
		testkit.Require(t, "tracefs", fmt.Sprintf("needs a kernel that traces system calls: %v", err))
	}
	t.Cleanup(func() { _ = os.WriteFile(event, []byte("0"), 0) })
	return func() int {
		text, err := os.ReadFile(filepath.Join(instance, "trace"))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "sys_fdatasync -> 0x0")
	}
}

// guestFlushes is how many flushes the guest's disk has completed (the
// sixteenth number of Documentation/block/stat.rst).
func guestFlushes(t *testing.T, ctx context.Context, vm running) int {
	t.Helper()
	fields := strings.Fields(sh(t, ctx, vm, "cat /sys/block/vda/stat"))
	if len(fields) < 16 {
		t.Fatalf("stat of the guest's disk: %q", fields)
	}
	n, err := strconv.Atoi(fields[15])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestCaseC1 counts: for each flush that the guest's kernel has seen completed
// the host's kernel has completed an fdatasync. That it happens before, and what
// is left after a power cut, is for TestC1Flush and TestPowerCutC1.
func TestCaseC1(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "flusher"})
	sh(t, ctx, vm, "sync")
	count := traceSyncs(t)
	flushed, synced := guestFlushes(t, ctx, vm), count()
	sh(t, ctx, vm, "for i in 1 2 3 4 5; do dd if=/dev/urandom of=/root/file$i bs=64k count=4 conv=fsync 2>/dev/null; done; "+
		"for i in $(seq 20); do echo $i > /root/small$i; sync; done")
	// In this order: a flush in between counts for the host only.
	flushed = guestFlushes(t, ctx, vm) - flushed
	synced = count() - synced
	if flushed < 25 || synced < flushed {
		t.Errorf("the guest has completed %d flushes, the host %d", flushed, synced)
	}
	t.Logf("%d flushes of the guest, %d of the host", flushed, synced)
}

// startRandom starts guestload's random disk load.
func startRandom(t *testing.T, ctx context.Context, vm running) {
	t.Helper()
	sh(t, ctx, vm, "mkdir -p /var/tmp; setsid sh -c 'guestload random -size 8 -depth 64 >/run/random.log 2>&1; echo $? >/run/random.exit' & true")
	randomGoesOn(t, ctx, vm)
}

// randomGoesOn returns when requests have been completed since it was called.
func randomGoesOn(t *testing.T, ctx context.Context, vm running) {
	t.Helper()
	requests := func() int {
		n, err := strconv.Atoi(sh(t, ctx, vm, "cat /run/random.log >&2; test ! -e /run/random.exit; cat /run/random 2>/dev/null || echo 0"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := requests()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		// Beyond what was in flight.
		if requests() > before+256 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the guest's disk load stands still after %d requests", before)
		}
	}
}

// TestCaseC2 snapshots a guest with 64 random writes in flight again and again,
// each time from the clone of the time before: while a machine is paused its
// disk does not change, the clone's requests all complete, no page is wrong, and
// the file system of each snapshot is sound.
func TestCaseC2(t *testing.T) {
	rounds := 2
	if !testing.Short() {
		rounds = int(soakNumber(t, "SOAK_ROUNDS", 20))
	}
	ctx := begin(t)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Duration(rounds)*patience)
	defer cancel()
	st, name := parent(t, ctx, 1)
	own := openStore(t)
	dir := t.TempDir()
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "round-0", TempDir: dir})
	startRandom(t, ctx, vm)
	for round := range rounds {
		if err := vm.Pause(); err != nil {
			t.Fatal(err)
		}
		tops := topFiles(t, dir)
		first := hashOpen(t, tops)
		time.Sleep(500 * time.Millisecond)
		if hashOpen(t, tops) != first {
			t.Errorf("round %d: the disk of a paused machine changed", round)
		}
		name := fmt.Sprintf("round-%d", round)
		takeSnapshot(t, ctx, vm, own, name)
		// Without a word to the guest, as when its process is killed.
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
		dir = t.TempDir()
		vm = restore(t, ctx, own, name, forkvm.Config{Name: name, TempDir: dir})
		begun := time.Now()
		randomGoesOn(t, ctx, vm)
		t.Logf("round %d: requests complete after %v", round, time.Since(begun).Round(time.Millisecond))
		checkFilesystem(t, exportDisk(t, own, name))
	}
	sh(t, ctx, vm, "touch /run/random.stop; while ! test -e /run/random.exit; do sleep 0.1; done; cat /run/random.log >&2; exit $(cat /run/random.exit)")
	sh(t, ctx, vm, "sync")
	takeSnapshot(t, ctx, vm, own, "last")
	checkFilesystem(t, exportDisk(t, own, "last"))
}

// diskErrors collects what a machine says of the host's storage.
type diskErrors struct {
	mu   sync.Mutex
	list []error
}

func (d *diskErrors) note(_ string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.list = append(d.list, err)
}

// take returns what came since the last time.
func (d *diskErrors) take() []error {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.list
	d.list = nil
	return list
}

// fillUp takes all that is left of a file system, and returns what gives it back.
func fillUp(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for n := 1 << 20; n >= 4096; {
		if _, err := f.Write(make([]byte, n)); errors.Is(err, unix.ENOSPC) {
			n /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCaseC5 fills the host's disk while a guest writes: the guest gets an I/O
// error, never a success with lost data, its guest agent answers, the host is
// told the cause, other machines go on, and with space again writes work.
func TestCaseC5(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	dir := mountSmall(t, "24m")
	told := &diskErrors{}
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "full", TempDir: dir, OnDiskError: told.note})
	other := restore(t, ctx, st, name, forkvm.Config{Name: "other"})
	answers := func() {
		t.Helper()
		begun := time.Now()
		if out := sh(t, ctx, vm, "echo ok"); out != "ok" {
			t.Errorf("the guest agent answers %q", out)
		}
		if took := time.Since(begun); took > time.Second {
			t.Errorf("the guest agent answers after %v", took)
		}
	}

	// Blocks that are in a layer below, so that writing them again needs space.
	// The journal has no reason to write meanwhile: it would give up for ever.
	sh(t, ctx, vm, "mount -o remount,noatime,commit=300 /; head -c 8388608 /dev/urandom > /root/big; sync")
	if _, err := vm.Snapshot(ctx, openStore(t), "before"); err != nil {
		t.Fatal(err)
	}
	over := "dd if=/dev/urandom of=/root/big bs=64k count=32 conv=notrunc oflag=direct"
	free := fillUp(t, dir)
	if out, err := attempt(ctx, vm, over); err == nil || !strings.Contains(err.Error(), "Input/output error") {
		t.Errorf("a write to a full host: %q, %v; want an input/output error", out, err)
	}
	answers()
	sh(t, ctx, other, "head -c 1000000 /dev/urandom > /root/more; sync")
	errs := told.take()
	if len(errs) == 0 {
		t.Error("nobody was told that the host is full")
	}
	for _, err := range errs {
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("told of %v", err)
		}
	}
	free()
	sh(t, ctx, vm, over)
	sh(t, ctx, vm, "head -c 2097152 /root/big | sha256sum > /run/a; echo 3 > /proc/sys/vm/drop_caches; head -c 2097152 /root/big | sha256sum | cmp - /run/a; echo more > /root/small; sync")
	if errs := told.take(); len(errs) != 0 {
		t.Errorf("with space again: %v", errs)
	}
	own := openStore(t)
	takeSnapshot(t, ctx, vm, own, "after")
	checkFilesystem(t, exportDisk(t, own, "after"))

	// More than there is, through the file system.
	if out, err := attempt(ctx, vm, "dd if=/dev/urandom of=/root/huge bs=1M count=32 conv=fsync"); err == nil {
		t.Errorf("32 MiB on a host disk with 24 were written: %s", out)
	}
	answers()
	if errs := told.take(); len(errs) == 0 || !errors.Is(errs[0], syscall.ENOSPC) {
		t.Errorf("told of %v", errs)
	}
	sh(t, ctx, other, "echo fine > /root/more; sync")
}

// TestCaseE7 has commands take more memory than the guest has: the kernel ends
// them and not the guest agent, whose answer says what happened.
func TestCaseE7(t *testing.T) {
	if testing.Short() {
		ctx := begin(t)
		st, name := parent(t, ctx, 1)
		outOfMemory(t, ctx, restore(t, ctx, st, name, forkvm.Config{Name: "hungry"}), guestMemory, "exec guestload hog -size 1024")
		return
	}
	const memory = 512 << 20
	processes, doublings := 200, 20
	if testkit.InLab() {
		processes, doublings = 40, 7 // still half as much again as there is
	}
	for what, script := range map[string]string{
		"one process": "exec guestload hog -size 2048",
		// All of them at it for a while.
		"many processes":     fmt.Sprintf("for i in $(seq %d); do head -c 20971520 /dev/zero | tail -c 20971520 | sleep 3 & done; wait; kill -9 $$", processes),
		"memory file system": "mkdir -p /mnt && mount -t tmpfs -o size=2g none /mnt && exec dd if=/dev/zero of=/mnt/full bs=1M count=2000",
		"fork bomb":          fmt.Sprintf("b() { test $1 = 0 && exec sleep 1000; b $(($1-1)) | b $(($1-1)); }; b %d & exec guestload hog -size 2048", doublings),
	} {
		t.Run(what, func(t *testing.T) {
			ctx := begin(t)
			vm, err := forkvm.Boot(ctx, openImage(t, "disk"), config(t, forkvm.Config{Name: "hungry", MemoryBytes: memory}))
			if err != nil {
				t.Fatal(err)
			}
			closeAtEnd(t, vm)
			putProgram(t, ctx, vm)
			outOfMemory(t, ctx, vm, memory, script)
		})
	}
}

func outOfMemory(t *testing.T, ctx context.Context, vm *forkvm.VM, memory int64, script string) {
	if got := sh(t, ctx, vm, "cat /proc/1/oom_score_adj /proc/self/oom_score_adj"); got != "-1000\n0" {
		t.Errorf("scores of the guest agent and of a command: %q", got)
	}
	boot := sh(t, ctx, vm, "cat /proc/sys/kernel/random/boot_id")
	result, err := vm.Agent().Exec(ctx, client.Command{Args: []string{"/bin/sh", "-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	if result.Signal != int(unix.SIGKILL) || !result.OOMKilled {
		t.Errorf("a command that took all memory ended as %+v", result)
	}
	begun := time.Now()
	if out := sh(t, ctx, vm, "umount /mnt 2>/dev/null; echo ok"); out != "ok" {
		t.Errorf("the guest agent answers %q", out)
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("the guest agent answers after %v", took)
	}
	if got := sh(t, ctx, vm, "cat /proc/sys/kernel/random/boot_id"); got != boot {
		t.Errorf("the guest booted anew: %s, was %s", got, boot)
	}
	if exit := vm.Exit(); exit != nil {
		t.Errorf("the machine has ended: %v", exit)
	}
	if kept, most := residentBytes(t), memory+64<<20; kept > most {
		t.Errorf("the machine's process holds %d MiB, the guest has %d", kept>>20, memory>>20)
	}
}

// residentBytes is the private memory of this process.
func residentBytes(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "RssAnon:")
	var kilobytes int64
	if _, err := fmt.Sscan(rest, &kilobytes); err != nil {
		t.Fatal(err)
	}
	return kilobytes << 10
}
