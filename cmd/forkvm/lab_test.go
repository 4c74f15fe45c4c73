package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/testkit"
)

func TestRunPrintsTheGuestsKernel(t *testing.T) {
	h := newHost(t, "")
	img, err := image.Open(filepath.Join(testkit.RequireGuest(t), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	out := h.must("run", slowly, "--rm", "--name", "first", "--memory", guestMemory, h.image("disk"), "--", "uname", "-a")
	if want := "Linux first " + img.Manifest().KernelRelease; !strings.HasPrefix(out, want) {
		t.Errorf("got %q, want %q", out, want)
	}
	if left := h.must("ls", "-aq"); left != "" {
		t.Errorf("run --rm left %q", left)
	}
	r := h.forkvm("run", slowly, "--memory", guestMemory, "--name", "kept", "disk", "--", "sh", "-c", "exit 3")
	if r.code != 3 {
		t.Error(r)
	}
	if got := h.inspect("kept").State; got != "ended" {
		t.Errorf("a VM that run left is %s", got)
	}
}

func TestExitCodesPassThrough(t *testing.T) {
	h := newHost(t, "")
	h.start("codes")
	for _, c := range []struct {
		name string
		args []string
		code int
	}{
		{"zero", []string{"true"}, 0},
		{"own", []string{"sh", "-c", "exit 7"}, 7},
		{"own 125", []string{"sh", "-c", "exit 125"}, 125},
		{"not executable", []string{"/etc/passwd"}, 126},
		{"not found", []string{"no-such-program"}, 127},
		{"signal", []string{"sh", "-c", "kill -9 $$"}, 137},
		{"timeout", []string{"sleep", "1000"}, 124},
	} {
		t.Run(c.name, func(t *testing.T) {
			flags := []string{"exec"}
			if c.code == 124 {
				flags = append(flags, "--timeout", "500ms")
			}
			args := append(append(flags, "codes", "--"), c.args...)
			if r := h.forkvm(args...); r.code != c.code {
				t.Errorf("want %d: %v", c.code, r)
			}
			r := h.forkvm(append([]string{"exec", "-o", "json"}, args[1:]...)...)
			var v struct {
				ExitCode int  `json:"exit_code"`
				Signal   int  `json:"signal"`
				TimedOut bool `json:"timed_out"`
				Error    *struct{ Code string }
			}
			if err := json.Unmarshal([]byte(r.stdout), &v); err != nil || r.code != c.code || v.ExitCode != c.code || v.TimedOut != (c.code == 124) {
				t.Errorf("%v: %v", err, r)
			}
			if ours := c.code == 126 || c.code == 127; ours != (v.Error != nil) {
				t.Errorf("error %v: %v", v.Error, r)
			}
		})
	}
}

func TestExecConnectsStreams(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	h.start("streams")
	r := h.typing("typed", "exec", "-i", "-e", "A=b c", "-w", "/etc", "-u", "user", "streams", "--",
		"sh", "-c", `cat; echo " $A $(pwd) $(id -un)"; echo problem >&2`)
	if r.code != 0 || r.stdout != "typed b c /etc user\n" || r.stderr != "problem\n" {
		t.Error(r)
	}
	// More than all buffers together hold, both ways.
	big := strings.Repeat("0123456789abcde\n", 1<<16)
	if r := h.typing(big, "exec", "-i", "streams", "--", "cat"); r.code != 0 || r.stdout != big {
		t.Errorf("%d bytes came back of %d, exit code %d, %s", len(r.stdout), len(big), r.code, r.stderr)
	}
}

func TestGuestSeesItsSize(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	const memory = 6 << 30
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil || info.Totalram*uint64(info.Unit) < memory {
		testkit.Require(t, "memory", "needs a machine with more than 6 GiB: LAB_MEM=8G")
	}
	out := h.must("run", slowly, "--rm", "--cpus", "4", "--memory", "6G", h.image("disk"), "--",
		"sh", "-c", "nproc; awk '/^MemTotal/ {print $2}' /proc/meminfo")
	var cpus, kilobytes int
	if _, err := fmt.Sscan(out, &cpus, &kilobytes); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	// The kernel keeps a few percent for itself.
	if bytes := kilobytes << 10; cpus != 4 || bytes > memory || bytes < memory*9/10 {
		t.Errorf("the guest sees %d processors and %d MiB", cpus, kilobytes>>10)
	}
}

func TestBadReferences(t *testing.T) {
	h := newHost(t, "")
	h.start("taken")
	h.refused("vm_exists", "create", "--snapshot", "base", "--name", "taken")
	h.refused("vm_exists", "create", "--name", "taken", "disk")
	h.refused("vm_not_found", "kill", "nobody", "taken-not")
	h.refused("vm_not_found", "cp", "/etc/passwd", "nobody:/x")
	h.refused("vm_not_found", "snapshot", "nobody", "x")
	h.refused("snapshot_exists", "snapshot", "taken", "base")
	h.refused("snapshot_not_found", "create", "--snapshot", "nothing")
	h.refused("image_not_found", "create", "nothing")
	h.refused("invalid_argument", "create", "--name", "Not a name", "disk")
	h.refused("invalid_argument", "create", "--memory", "1000T", "disk")
	h.refused("invalid_argument", "create", "--memory", "1M", "disk")
	h.refused("invalid_argument", "snapshot", "taken", "../up")
	h.refused("file_not_found", "cp", "taken:/nothing", h.run+"/x")

	// Each child of a fork succeeds or fails on its own.
	r := h.forkvm("fork", slowly, "taken", "--name", "taken", "--name", "child")
	if r.code != 1 || len(strings.Fields(r.stdout)) != 1 || !strings.Contains(r.stderr, "taken") {
		t.Error(r)
	}
	if got := h.sh("child", "hostname"); got != "child" {
		t.Errorf("the child's hostname is %q", got)
	}
}

func TestSnapshotRestoreAndFork(t *testing.T) {
	h := newHost(t, "")
	h.start("parent")
	h.sh("parent", "echo before > /root/mark; sync")
	h.must("snapshot", "parent", "cli-marked", "--task", "mark")
	defer h.forkvm("snapshot", "rm", "cli-marked")
	h.sh("parent", "echo after > /root/mark")
	ids := strings.Fields(h.must("restore", slowly, "cli-marked", "--name", "left", "--name", "right"))
	if len(ids) != 2 || h.inspect("left").ID != ids[0] || h.inspect("right").ID != ids[1] {
		t.Errorf("ids %q are not those of the names, in their order", ids)
	}
	h.sh("left", "echo left > /root/mark")
	h.must("fork", slowly, "left", "--name", "leaf")
	for vm, want := range map[string]string{"parent": "after", "left": "left", "right": "before", "leaf": "left"} {
		if got := h.sh(vm, "cat /root/mark; hostname"); got != want+"\n"+vm {
			t.Errorf("%s sees %q, want %q", vm, got, want)
		}
	}
	if got := strings.Fields(h.must("snapshot", "ls", "-q")); !contains(got, "cli-marked") {
		t.Errorf("listed: %q", got)
	}
	h.must("snapshot", "check", "cli-marked")
}

func TestReset(t *testing.T) {
	h := newHost(t, "")
	before := h.start("looper")
	h.sh("looper", "echo mark > /root/mark; sync")
	h.must("snapshot", "looper", "cli-step")
	defer h.forkvm("snapshot", "rm", "cli-step")
	h.must("fork", slowly, "looper", "--name", "child")

	running := make(chan result)
	go func() {
		running <- h.forkvm("exec", "-o", "json", "looper", "--", "sh", "-c", "echo > /root/running; sleep 1000")
	}()
	h.eventually("the command runs", func() bool { return h.forkvm("exec", "looper", "test", "-e", "/root/running").code == 0 })
	if got := h.must("reset", slowly, "looper"); got != "looper\n" {
		t.Errorf("reset prints %q", got)
	}
	if r := <-running; r.code != 125 || !strings.Contains(r.stdout, `"code":"vm_reset"`) && !strings.Contains(r.stdout, `"code": "vm_reset"`) {
		t.Errorf("the command that was under way: %v", r)
	}
	after := h.inspect("looper")
	if after.PID != before.PID || after.ID != before.ID || after.MachineID != before.MachineID || after.Generation == before.Generation {
		t.Errorf("before %+v, after %+v", before, after)
	}
	show := "cat /root/mark 2>/dev/null || echo none; hostname; cat /run/forkvm/generation"
	if got, want := h.sh("looper", show), "none\nlooper\n"+after.Generation; got != want {
		t.Errorf("guest sees %q, want %q", got, want)
	}

	h.must("reset", slowly, "--to", "cli-step", "looper")
	h.sh("looper", "rm /root/mark")
	h.must("pause", "looper")
	h.must("reset", slowly, "looper") // that is what it comes from now
	if got := h.inspect("looper"); got.State != "paused" || got.Snapshot != "cli-step" {
		t.Errorf("after the reset of a paused VM: %+v", got)
	}
	h.must("resume", "looper")
	if got := h.sh("looper", "cat /root/mark"); got != "mark" {
		t.Errorf("guest sees %q", got)
	}

	// A forked VM goes back to the fork.
	h.sh("child", "echo other > /root/mark")
	h.must("reset", slowly, "child")
	if got := h.sh("child", "cat /root/mark; hostname"); got != "mark\nchild" {
		t.Errorf("child sees %q", got)
	}

	h.refused("snapshot_not_found", "reset", "--to", "nothing", "child")
	h.refused("vm_not_found", "reset", "nobody")
	h.must("kill", "child")
	h.refused("vm_not_running", "reset", "child")
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

func TestPauseAndResume(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	h.start("sleeper")
	h.must("pause", "sleeper")
	h.must("pause", "sleeper")
	if got := h.inspect("sleeper").State; got != "paused" {
		t.Errorf("state %s", got)
	}
	if r := h.forkvm("exec", "sleeper", "true"); r.code != 125 || !strings.Contains(r.stderr, "paused") || r.took > promptly {
		t.Error(r)
	}
	h.must("resume", "sleeper")
	h.sh("sleeper", "true")
}

func TestCopyThereAndBack(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	h.start("files")
	dir := t.TempDir()
	data := bytes.Repeat([]byte("forkvm\x00\xff"), 1<<18)
	there, back := filepath.Join(dir, "there"), filepath.Join(dir, "back")
	if err := os.WriteFile(there, data, 0o750); err != nil {
		t.Fatal(err)
	}
	h.must("cp", there, "files:/root/")
	want := fmt.Sprintf("%x  /root/there", sha256.Sum256(data))
	if got := h.sh("files", "sha256sum /root/there"); got != want {
		t.Errorf("in the guest: %s, want %s", got, want)
	}
	h.must("cp", "files:/root/there", back)
	got, err := os.ReadFile(back)
	info, statErr := os.Stat(back)
	if err != nil || statErr != nil || !bytes.Equal(got, data) || info.Mode() != 0o750 {
		t.Errorf("%d bytes came back, %v, %v", len(got), info.Mode(), errors.Join(err, statErr))
	}

	h.sh("files", "mkdir -p /srv/tree/sub && cd /srv/tree && ln -s sub link && echo inner > sub/file && chmod 600 sub/file && ln sub/file same")
	h.must("cp", "files:/srv/tree", dir)
	if target, err := os.Readlink(filepath.Join(dir, "tree", "link")); target != "sub" {
		t.Errorf("link to %q, %v", target, err)
	}
	h.must("cp", filepath.Join(dir, "tree"), "files:/srv/copy")
	if diff := h.sh("files", "diff -r /srv/tree /srv/copy && stat -c '%a %h' /srv/copy/sub/file"); diff != "600 2" {
		t.Errorf("tree is not what it was: %s", diff)
	}
}

func TestEndOfTheGuest(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	h.start("quits")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var log bytes.Buffer
	follow := h.command(ctx, "logs", "-f", "quits")
	follow.Stdout = &log
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	// A command under which the machine goes away has no exit code of its own.
	r := h.forkvm("exec", "quits", "--", "sh", "-c", "echo last words > /dev/ttyS0; poweroff -f; sleep 1000")
	if r.code != 125 || !strings.Contains(r.stderr, "shutdown") {
		t.Error(r)
	}
	if got := strings.TrimSpace(h.must("wait", "quits")); got != "shutdown" {
		t.Errorf("wait says %q", got)
	}
	if err := follow.Wait(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "last words") {
		t.Errorf("the console shows %q", log.String())
	}
	h.refused("vm_not_running", "pause", "quits")
	h.must("rm", "quits")
}

func TestVMProcessIsKilled(t *testing.T) {
	h := newHost(t, "")
	vm := h.start("victim")
	if err := syscall.Kill(vm.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.eventually("the VM is dead", func() bool { return h.inspect("victim").State == "dead" })
	if out := h.must("ls", "-q"); out != "" {
		t.Errorf("ls shows %q", out)
	}
	h.refused("vm_not_running", "pause", "victim")
	for _, pattern := range []string{"*.sock"} {
		if left, _ := filepath.Glob(filepath.Join(vm.Directory, pattern)); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	h.must("rm", "victim")
	if _, err := os.Stat(vm.Directory); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("rm left %s: %v", vm.Directory, err)
	}
	h.start("victim") // the name is free, the snapshot intact
}

// A command line that is killed takes the VM that it was just making with it.
func TestCommandLineIsKilledDuringCreate(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	cmd := h.command(t.Context(), "create", "--name", "orphan", "--memory", guestMemory, h.image("disk"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	h.eventually("a VM process is on record", func() bool {
		records, _ := filepath.Glob(filepath.Join(h.run, "vms", "*", "vm.json"))
		if len(records) == 0 {
			return false
		}
		data, err := os.ReadFile(records[0])
		var r struct{ PID int }
		if err != nil || json.Unmarshal(data, &r) != nil {
			return false
		}
		pid = r.PID
		return pid != 0
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	h.eventually("the VM process is gone", func() bool { return gone(pid) })
	if out := h.must("ls", "-q"); out != "" {
		t.Errorf("ls shows %q", out)
	}
	h.forkvm("rm", "orphan") // if it is listed as dead
	h.start("orphan")
}

// gone says whether a process has ended; nobody may have collected it yet.
func gone(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z") || strings.HasPrefix(rest, "X")
}

func TestInterruptedRunLeavesNothing(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := h.command(ctx, "run", slowly, "--rm", "--name", "busy", "--memory", guestMemory, h.image("disk"), "--", "sh", "-c", "echo up; sleep 1000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 3)
	if _, err := out.Read(line); err != nil {
		t.Fatal(err)
	}
	pid := h.inspect("busy").PID
	begun := time.Now()
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 || time.Since(begun) > promptly {
		t.Errorf("exit code %d after %v", code, time.Since(begun))
	}
	if !gone(pid) {
		t.Error("the VM process goes on")
	}
	if left := h.must("ls", "-aq"); left != "" {
		t.Errorf("left: %q", left)
	}
}

func TestBadImages(t *testing.T) {
	h := newHost(t, t.TempDir())
	agent := filepath.Join(testkit.RequireGuest(t), "forkvm-agent")
	for _, kernel := range []string{"/etc/passwd", agent, "/dev/zero", "/does/not/exist"} {
		h.refused("image_invalid", "image", "build", "bad", "--guest-agent", agent, "--kernel", kernel)
	}
	vmlinux := filepath.Join(testkit.RequireGuest(t), "memory", "vmlinux")
	h.refused("image_invalid", "image", "build", "bad", "--guest-agent", "/etc/passwd", "--kernel", vmlinux)
	// A kernel alone lacks the drivers that a stock one has as modules.
	h.refused("image_invalid", "image", "build", "bad", "--guest-agent", agent, "--kernel", vmlinux)
	if out := h.must("image", "ls", "-q"); out != "" {
		t.Errorf("half-made images are listed: %q", out)
	}

	h.image("memory")
	rotten := filepath.Join(h.data, "images", "memory")
	for file, want := range map[string]string{"initrd": "image_invalid", "image.json": "image_invalid"} {
		restore := damage(t, filepath.Join(rotten, file), func(b []byte) []byte { return b[:len(b)/2] })
		h.refused(want, "create", "memory")
		if out := h.must("image", "ls"); !strings.Contains(out, want) {
			t.Errorf("a damaged image is listed as\n%s", out)
		}
		restore()
	}
}

// damage changes a file's contents. The function that it returns puts them back.
func damage(t *testing.T, path string, change func([]byte) []byte) func() {
	t.Helper()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	write(change(bytes.Clone(whole)))
	return func() { write(whole) }
}

func TestDamagedSnapshots(t *testing.T) {
	h := newHost(t, "")
	h.start("source")
	h.must("snapshot", "source", "cli-damaged")
	h.must("kill", "source")
	defer h.forkvm("snapshot", "rm", "cli-damaged")
	dir := filepath.Join(h.data, "snapshots", "cli-damaged")
	// A layer of its own, not one that base shares with it.
	layer := newestLayer(t, dir, filepath.Join(h.data, "snapshots", "base"))

	cut := func(b []byte) []byte { return b[:len(b)-1] }
	flip := func(at int) func([]byte) []byte {
		return func(b []byte) []byte { b[(at+len(b))%len(b)] ^= 4; return b }
	}
	older := func(b []byte) []byte {
		return bytes.Replace(b, []byte("forkvm/snapshot/v1"), []byte("forkvm/snapshot/v9"), 1)
	}
	for _, c := range []struct {
		name, file string
		change     func([]byte) []byte
		code       string
	}{
		{"manifest cut short", "manifest.json", cut, "snapshot_corrupt"},
		{"manifest with a flipped bit", "manifest.json", flip(200), "snapshot_corrupt"},
		{"manifest of another version", "manifest.json", older, "snapshot_unsupported"},
		{"state cut short", "state", cut, "snapshot_corrupt"},
		{"state with a flipped bit", "state", flip(-100), "snapshot_corrupt"},
		{"layer cut short", layer, cut, "snapshot_corrupt"},
		{"layer with a flipped bit in its header", layer, flip(40), "snapshot_corrupt"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := &host{t: t, data: h.data, run: h.run}
			restore := damage(t, filepath.Join(dir, c.file), c.change)
			defer restore()
			h.refused(c.code, "create", "--snapshot", "cli-damaged")
		})
	}
	restore := damage(t, filepath.Join(dir, layer), flip(4096+1000))
	if r := h.forkvm("snapshot", "check", "cli-damaged"); r.code != 1 {
		t.Errorf("a flipped bit in a page is not found: %v", r)
	}
	restore()
	h.must("snapshot", "check", "cli-damaged")
	h.must("create", slowly, "--snapshot", "cli-damaged", "--name", "whole")
}

func newestLayer(t *testing.T, dir, other string) string {
	t.Helper()
	layers, err := filepath.Glob(filepath.Join(dir, "memory-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		if _, err := os.Stat(filepath.Join(other, filepath.Base(l))); errors.Is(err, os.ErrNotExist) {
			return filepath.Base(l)
		}
	}
	t.Fatalf("%s has no memory layer of its own: %v", dir, layers)
	return ""
}

// smallDisk returns a data directory on a file system of its own, which has to be
// free of users at the end.
func smallDisk(t *testing.T) string {
	t.Helper()
	testkit.RequireRoot(t)
	data := t.TempDir()
	if err := unix.Mount("tmpfs", data, "tmpfs", 0, "size=512m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(data, 0); err != nil {
			t.Errorf("something still uses the data directory: %v", err)
		}
	})
	return data
}

// The host's disk fills up while a snapshot is written: the VM goes on, and
// nothing half-written is listed.
func TestHostDiskFullDuringSnapshot(t *testing.T) {
	data := smallDisk(t)
	h := newHost(t, data)
	h.must("create", slowly, "--name", "survivor", "--memory", guestMemory, h.image("memory"))
	h.sh("survivor", "head -c 33554432 /dev/urandom > /tmp/noise; sha256sum /tmp/noise > /tmp/sum")

	filler := filepath.Join(data, "filler")
	fill(t, filler, 8<<20)
	before := used(t, data)
	h.refused("no_space", "snapshot", "survivor", "big")
	if out := h.must("snapshot", "ls", "-q"); out != "" {
		t.Errorf("listed: %q", out)
	}
	if after := used(t, data); after > before+1<<20 {
		t.Errorf("%d KiB are left of the snapshot", (after-before)>>10)
	}
	h.sh("survivor", "sha256sum -c /tmp/sum")

	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	h.must("snapshot", "survivor", "big")
	h.must("create", slowly, "--snapshot", "big", "--name", "clone")
	h.sh("clone", "sha256sum -c /tmp/sum")
}

// The host's disk fills up under a guest: the write fails, inspect says why, and
// the VM goes on.
func TestCaseC5(t *testing.T) {
	testkit.Long(t)
	data := smallDisk(t)
	h := newHost(t, data)
	h.must("create", slowly, "--name", "full", "--memory", guestMemory, h.image("disk"))
	fill(t, filepath.Join(data, "filler"), 4<<20)
	if r := h.forkvm("exec", "full", "--", "dd", "if=/dev/urandom", "of=/root/big", "bs=1M", "count=16", "conv=fsync"); r.code == 0 {
		t.Errorf("16 MiB were written to a host disk with 4: %v", r)
	}
	if e := h.inspect("full").DiskError; e == nil || e.Code != "no_space" {
		t.Errorf("disk error of the VM: %+v", e)
	}
	if out := h.sh("full", "echo ok"); out != "ok" {
		t.Errorf("the guest agent answers %q", out)
	}
}

// The process of a VM with writes in flight is killed after a snapshot: the
// snapshot is whole, and its clone's writes go on.
func TestCaseC2(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	vm := h.start("writer")
	h.must("cp", filepath.Join(testkit.RequireGuest(t), "guestload"), "writer:/usr/bin/guestload")
	h.sh("writer", "mkdir -p /var/tmp; setsid sh -c 'guestload random -depth 64 >/run/random.log 2>&1; echo $? >/run/random.exit' >/dev/null 2>&1 & true")
	requests := func(name string) int {
		n, err := strconv.Atoi(h.sh(name, "cat /run/random 2>/dev/null || echo 0"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	h.eventually("the guest writes", func() bool { return requests("writer") > 256 })
	h.must("pause", "writer")
	h.must("snapshot", "writer", "in-flight")
	t.Cleanup(func() { h.must("snapshot", "rm", "in-flight") })
	if err := syscall.Kill(vm.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.must("create", slowly, "--snapshot", "in-flight", "--name", "clone")
	before := requests("clone")
	h.eventually("the clone's writes go on", func() bool { return requests("clone") > before+256 })
	h.sh("clone", "touch /run/random.stop; while ! test -e /run/random.exit; do sleep 0.1; done; cat /run/random.log >&2; exit $(cat /run/random.exit)")
}

// fill makes a file that leaves so much free.
func fill(t *testing.T, path string, free uint64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(path), &st); err != nil {
		t.Fatal(err)
	}
	size := st.Bavail*uint64(st.Bsize) - free
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size)); err != nil {
		t.Fatal(err)
	}
}

func used(t *testing.T, dir string) uint64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return (st.Blocks - st.Bfree) * uint64(st.Bsize)
}

func TestDoctorFindsTheLabUsable(t *testing.T) {
	h := newHost(t, "")
	out := h.must("doctor", "-o", "json")
	var r struct {
		Usable bool
		Checks []struct{ Name, Status, Detail string }
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil || !r.Usable || len(r.Checks) < 5 {
		t.Errorf("%v: %s", err, out)
	}
}

// The programs that VM processes run are not for people.
func TestStrayProcessProgram(t *testing.T) {
	testkit.RequireKVM(t)
	for _, name := range []string{"forkvm-vm", "forkvm-net"} {
		program := testkit.RequireFile(t, "/usr/local/bin/"+name, "make build")
		out, err := exec.Command(program).CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(string(out), name+": this is for forkvm itself") {
			t.Errorf("%s: %v, %s", name, err, out)
		}
	}
}
