package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/testkit"
)

// waiting lists the records of the processes that wait.
func (h *host) waiting() []node.Record {
	h.t.Helper()
	paths, err := filepath.Glob(filepath.Join(h.run, "waiting", "*", "vm.json"))
	if err != nil {
		h.t.Fatal(err)
	}
	var records []node.Record
	for _, path := range paths {
		records = append(records, h.record(filepath.Dir(path)))
	}
	return records
}

func (h *host) record(dir string) (r node.Record) {
	h.t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "vm.json"))
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return r
}

// prepare wants this many processes to wait.
func (h *host) prepare(count string, flags ...string) []node.Record {
	h.t.Helper()
	if got := strings.TrimSpace(h.must(append([]string{"prepare", "--count", count}, flags...)...)); got != count {
		h.t.Fatalf("%s processes wait, not %s", got, count)
	}
	return h.waiting()
}

// began tells whether a VM's process was started for it.
func (h *host) began(v view) bool {
	h.t.Helper()
	return slices.ContainsFunc(h.record(v.Directory).Phases, func(p machine.Phase) bool { return p.Name == "process" })
}

// facts are what a guest and a user can see of a VM, without what is its own.
// Of processes only those with a program count: the kernel's workers come and go.
func (h *host) facts(v view) string {
	h.t.Helper()
	own := strings.NewReplacer(v.ID, "ID", v.Name, "NAME")
	guest := h.sh(v.Name, "hostname; nproc; cat /proc/cmdline; grep MemTotal /proc/meminfo; ls /sys/bus/virtio/devices; ls -A /root; for p in /proc/[0-9]*/exe; do readlink $p; done | sort")
	files, err := os.ReadDir(v.Directory)
	if err != nil {
		h.t.Fatal(err)
	}
	names := []string{v.State}
	for _, f := range files {
		names = append(names, f.Name())
	}
	return own.Replace(guest + "\n" + strings.Join(names, " "))
}

func TestPrepared(t *testing.T) {
	h := newHost(t, "")
	usual := h.start("usual")
	if waiting := h.prepare("4"); len(waiting) != 4 {
		t.Fatalf("%d records", len(waiting))
	}
	if got := strings.TrimSpace(h.must("ls", "-aq")); got != usual.ID {
		t.Errorf("listed: %q", got)
	}
	fast := h.start("fast")
	if !h.began(usual) || h.began(fast) {
		t.Error("the process that waited was not used")
	}
	if got, want := h.facts(fast), h.facts(usual); got != want {
		t.Errorf("with a process that waited:\n%s\nwithout:\n%s", got, want)
	}

	// A name that is taken uses none up, and a fork one for each child.
	h.refused("vm_exists", "create", "--snapshot", "base", "--name", "fast")
	if waiting := h.waiting(); len(waiting) != 3 {
		t.Errorf("%d wait", len(waiting))
	}
	h.must("fork", slowly, "fast", "--name", "child", "--name", "twin")
	for _, name := range []string{"child", "twin"} {
		if h.began(h.inspect(name)) || h.sh(name, "hostname") != name {
			t.Errorf("%s did not use a process that waited", name)
		}
	}

	h.must("rm", "-f", "child", "twin")
	left := h.waiting()
	if waiting := h.prepare("0"); len(waiting) != 0 || len(left) != 1 {
		t.Errorf("%d wait after %d", len(waiting), len(left))
	}
	h.gone(left[0].PID)
}

func TestPreparedThatDoesNotFit(t *testing.T) {
	h := newHost(t, "")
	h.base()
	h.prepare("1", "--cpus", "2")
	h.prepare("1")
	var one node.Record
	for _, r := range h.waiting() {
		if r.Shape.CPUs == 1 {
			one = r
		}
	}

	// Of another build: rewritten, since there is only this one.
	path := filepath.Join(h.run, "waiting", one.ID, "vm.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(data), one.Program, "another", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if v := h.start("first"); !h.began(v) {
		t.Error("used a process of another build or for another number of vCPUs")
	}
	h.prepare("1")
	h.gone(one.PID)

	// One that was killed while it waited is passed over and cleared away.
	for _, r := range h.waiting() {
		if r.Shape.CPUs == 1 {
			one = r
		}
	}
	if err := syscall.Kill(one.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.gone(one.PID)
	if v := h.start("second"); !h.began(v) {
		t.Error("used a dead process")
	}
	h.prepare("0", "--cpus", "1")
	if waiting := h.waiting(); len(waiting) != 1 || waiting[0].Shape.CPUs != 2 {
		t.Errorf("%+v wait", waiting)
	}
	h.prepare("0")
	if entries, err := os.ReadDir(filepath.Join(h.run, "waiting")); err != nil || len(entries) != 0 {
		t.Errorf("%d directories are left, %v", len(entries), err)
	}
}

// TestRehearsed: a VM of a process that has been one before is like any other.
func TestRehearsed(t *testing.T) {
	h := newHost(t, "")
	usual := h.start("usual")
	h.prepare("3", "--snapshot", "base")
	fast, second := h.start("fast"), h.start("second")
	if !h.began(usual) || h.began(fast) || h.began(second) || len(h.waiting()) != 1 {
		t.Errorf("the processes that waited were not used: %d wait", len(h.waiting()))
	}
	if got, want := h.facts(fast), h.facts(usual); got != want {
		t.Errorf("with a process that has rehearsed:\n%s\nwithout:\n%s", got, want)
	}
	own := "cat /proc/sys/kernel/random/boot_id /etc/machine-id /run/forkvm/generation; hostname; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '"
	seen := map[string]bool{}
	for _, name := range []string{"usual", "fast", "second"} {
		for _, line := range strings.Fields(h.sh(name, own)) {
			if seen[line] {
				t.Errorf("%s has %s, as another VM", name, line)
			}
			seen[line] = true
		}
	}
	h.must("reset", "fast")
	if got := h.sh("fast", "hostname; ls -A /root"); got != "fast" {
		t.Errorf("behind a reset: %q", got)
	}

	// Children of its VMs can be made of it.
	h.sh("fast", "echo step > /root/step")
	h.must("fork", slowly, "fast", "--name", "child")
	if h.began(h.inspect("child")) || len(h.waiting()) != 0 || h.sh("child", "hostname; cat /root/step") != "child\nstep" {
		t.Error("the child has not used it, or is not what it should be")
	}
	h.must("rm", "-f", "child")
	h.prepare("1", "--snapshot", "base")

	// It is for no other snapshot, and a name that is taken does not use it up.
	h.must("snapshot", "fast", "other")
	h.must("create", slowly, "--snapshot", "other", "--name", "another")
	h.refused("vm_exists", "create", "--snapshot", "base", "--name", "fast")
	left := h.waiting()
	if !h.began(h.inspect("another")) || len(left) != 1 {
		t.Errorf("%d wait", len(left))
	}
	if err := syscall.Kill(left[0].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.gone(left[0].PID)
	if v := h.start("third"); !h.began(v) {
		t.Error("used a dead process")
	}

	left = h.prepare("1", "--snapshot", "other")
	h.must("snapshot", "rm", "other")
	h.gone(left[0].PID)
	if entries, err := os.ReadDir(filepath.Join(h.run, "waiting")); err != nil || len(entries) != 0 {
		t.Errorf("%d directories are left, %v", len(entries), err)
	}
	h.refused("snapshot_not_found", "prepare", "--snapshot", "other")
}

// A disk that is full while a life is rehearsed is an error of prepare.
func TestRehearsalOnAFullDisk(t *testing.T) {
	testkit.Long(t)
	data := smallDisk(t)
	h := newHost(t, data)
	h.must("create", slowly, "--name", "writer", "--memory", guestMemory, h.image("disk"))
	h.sh("writer", "(while :; do dd if=/dev/urandom of=/root/busy bs=4k count=1 conv=fsync; done) </dev/null >/dev/null 2>&1 &")
	h.must("snapshot", "writer", "busy")
	h.must("rm", "-f", "writer")
	filler := filepath.Join(data, "filler")
	fill(t, filler, 0)
	// In a full tmpfs the holes of layers cannot be read either, which ends a guest that does.
	if r := h.forkvm("prepare", "--snapshot", "busy", "-o", "jsonl"); r.code == 0 ||
		!strings.Contains(r.stderr, `"code":"no_space"`) && !strings.Contains(r.stderr, `"code":"guest_ended"`) {
		t.Errorf("want an error of the disk: %v", r)
	}
	if waiting := h.waiting(); len(waiting) != 0 {
		t.Errorf("%d wait", len(waiting))
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	h.prepare("1", "--snapshot", "busy")
	h.prepare("0")
}

// A prepare that is killed leaves processes that can be used, or none.
func TestPrepareIsKilled(t *testing.T) {
	h := newHost(t, "")
	for _, flags := range [][]string{nil, {"--snapshot", h.base()}} {
		for _, after := range []time.Duration{5 * time.Millisecond, 40 * time.Millisecond, 80 * time.Millisecond} {
			cmd := h.command(context.Background(), append([]string{"prepare", "--count", "20"}, flags...)...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(after)
			cmd.Process.Kill()
			cmd.Wait()
		}
		h.must("rm", "-f", h.start("after").ID)
		pids := h.waiting()
		h.prepare("0")
		for _, r := range pids {
			h.gone(r.PID)
		}
		// A process that was just being started when its maker was killed may have a lock for a moment.
		h.eventually("nothing is left", func() bool {
			h.prepare("0")
			entries, err := os.ReadDir(filepath.Join(h.run, "waiting"))
			return err == nil && len(entries) == 0
		})
	}
}

// gone waits for the end of a process.
func (h *host) gone(pid int) {
	h.t.Helper()
	h.eventually("end of a process that waited", func() bool {
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	})
}
