package node

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/vmm"
)

// behaviour tells this program, started again as a VM process, how to behave.
const behaviour = "FORKVM_TEST_VM_PROCESS"

func TestMain(m *testing.M) {
	switch os.Getenv(behaviour) {
	case "":
		testkit.Main(m)
	case "dies":
		os.Exit(3)
	case "hangs":
		time.Sleep(time.Hour)
	}
}

func open(t *testing.T) *Node {
	t.Helper()
	// t.TempDir is too long a path for sockets when a test's name is long.
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n, err := Open(Config{DataDir: filepath.Join(dir, "data"), RunDir: filepath.Join(dir, "run"), Command: []string{os.Args[0]}, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// record makes the directory of a VM whose process is p.
func record(t *testing.T, n *Node, name string, pid int, started uint64) *VM {
	t.Helper()
	d, err := n.newDraft(name)
	if err != nil {
		t.Fatal(err)
	}
	d.record.PID, d.record.Started = pid, started
	vm, err := d.finish(&process.Started{Ready: time.Millisecond}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return vm
}

// running returns a process that lives until the test ends.
func running(t *testing.T) *linux.Process {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := linux.OpenProcess(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); cmd.Process.Kill(); cmd.Wait() })
	return p
}

func TestNames(t *testing.T) {
	n := open(t)
	for _, name := range []string{"-a", "a-", "A", "a.b", "a/b", "..", strings.Repeat("a", 64), "a b"} {
		if _, err := n.newDraft(name); !failure.Is(err, failure.InvalidArgument) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	p := running(t)
	vm := record(t, n, "taken", p.PID(), p.Start())
	if _, err := n.newDraft("taken"); !failure.Is(err, failure.VMExists) {
		t.Errorf("second vm of a name: %v", err)
	}
	for _, ref := range []string{"taken", vm.ID, vm.ID[:5]} {
		if found, err := n.Find(ref); err != nil || found.ID != vm.ID {
			t.Errorf("find %q: %v", ref, err)
		}
	}
	for _, ref := range []string{"other", vm.ID[:2], ""} {
		if _, err := n.Find(ref); !failure.Is(err, failure.VMNotFound) {
			t.Errorf("find %q: %v", ref, err)
		}
	}
	if entries, _ := os.ReadDir(n.vmsDir()); len(entries) != 1 {
		t.Errorf("%d directories for one vm", len(entries))
	}
}

// A name whose VM's directory is gone is left over from a crash and free again.
func TestNameOfAVanishedVMIsFree(t *testing.T) {
	n := open(t)
	if err := os.Symlink("0123456789ab", filepath.Join(n.namesDir(), "ghost")); err != nil {
		t.Fatal(err)
	}
	d, err := n.newDraft("ghost")
	if err != nil {
		t.Fatal(err)
	}
	d.abandon()
	if exists(filepath.Join(n.namesDir(), "ghost")) || exists(d.dir) {
		t.Error("an abandoned draft left something behind")
	}
}

// Case G2: a record whose process number now belongs to somebody else is a dead
// VM, and the other process is left alone.
func TestCaseG2RecycledProcessNumber(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "stale", p.PID(), p.Start()+1)
	for _, socket := range []string{filepath.Join(vm.dir, process.ControlSocket), vm.VsockPath()} {
		if err := os.WriteFile(socket, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx := context.Background()
	vm, err := n.Find("stale")
	if err != nil {
		t.Fatal(err)
	}
	if st, err := vm.Status(ctx); err != nil || st.State != Dead {
		t.Errorf("status %+v, %v", st, err)
	}
	if exists(filepath.Join(vm.dir, process.ControlSocket)) || exists(vm.VsockPath()) {
		t.Error("sockets of a dead vm are still there")
	}
	if err := vm.Kill(ctx); err != nil {
		t.Errorf("kill: %v", err)
	}
	if _, err := vm.Wait(ctx); !failure.Is(err, failure.VMProcessGone) {
		t.Errorf("wait: %v", err)
	}
	if err := vm.Pause(ctx); !failure.Is(err, failure.VMNotRunning) {
		t.Errorf("pause: %v", err)
	}
	if err := vm.Remove(ctx, false); err != nil {
		t.Errorf("remove: %v", err)
	}
	if alive, err := p.Running(); err != nil || !alive {
		t.Error("the process with the recycled number was harmed")
	}
	if vms, err := n.List(); err != nil || len(vms) != 0 {
		t.Errorf("%d vms, %v", len(vms), err)
	}
}

// A VM of an earlier boot of the host is dead whatever its number.
// A VM that was for the time of one call is removed by whoever lists VMs when it has
// ended and the caller is gone, and not before.
func TestForsakenVMs(t *testing.T) {
	n := open(t)
	p := running(t)
	for _, c := range []struct {
		name  string
		start uint64 // of the VM's process, another one if it has ended
		owner *Owner
		left  bool
	}{
		{"stays", p.Start() + 1, nil, true},
		{"caller-lives", p.Start() + 1, &Owner{p.PID(), p.Start()}, true},
		{"lives", p.Start(), &Owner{p.PID(), p.Start() + 1}, true},
		{"forsaken", p.Start() + 1, &Owner{p.PID(), p.Start() + 1}, false},
	} {
		vm := record(t, n, c.name, p.PID(), c.start)
		vm.Owner = c.owner
		if err := vm.Record.write(vm.dir); err != nil {
			t.Fatal(err)
		}
		if _, err := n.Find(c.name); (err == nil) != c.left {
			t.Errorf("%s: %v", c.name, err)
		}
		if exists(vm.dir) != c.left || exists(filepath.Join(n.namesDir(), c.name)) != c.left {
			t.Errorf("%s: directory or name are there, or are not", c.name)
		}
	}
}

func TestProcessOfAnotherBoot(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "old", p.PID(), p.Start())
	vm.HostBoot = "another"
	if vm.alive() {
		t.Error("alive")
	}
}

func TestEndedVMTellsWhy(t *testing.T) {
	n := open(t)
	vm := record(t, n, "done", 1<<22+1, 1)
	report := `{"reason":"guest_panic","vcpu":1,"detail":"x","console":["Kernel panic"]}`
	if err := os.WriteFile(filepath.Join(filepath.Dir(vm.VsockPath()), "exit.json"), []byte(report), 0o600); err != nil {
		t.Fatal(err)
	}
	exit, err := vm.Wait(context.Background())
	if err != nil || exit.Reason != vmm.ReasonGuestPanic || exit.VCPU != 1 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	if st, err := vm.Status(context.Background()); err != nil || st.State != Ended || st.Exit == nil {
		t.Errorf("status %+v, %v", st, err)
	}
}

func TestRunningVMIsNotRemovedByAccident(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "busy", p.PID(), p.Start())
	if err := vm.Remove(context.Background(), false); !failure.Is(err, failure.InvalidArgument) {
		t.Errorf("remove: %v", err)
	}
	// This process does not answer, so it is killed the hard way.
	if err := vm.Remove(context.Background(), true); err != nil {
		t.Errorf("remove by force: %v", err)
	}
	if exists(vm.dir) {
		t.Error("directory is still there")
	}
}

// A directory without a record is swept, unless its maker is at work.
func TestUnfinishedDirectories(t *testing.T) {
	n := open(t)
	d, err := n.newDraft("making")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.List(); err != nil {
		t.Fatal(err)
	}
	if !exists(d.dir) {
		t.Error("a vm in the making was swept")
	}
	d.lock.Close() // as if its maker had died
	if _, err := n.List(); err != nil {
		t.Fatal(err)
	}
	if exists(d.dir) {
		t.Error("an abandoned directory was not swept")
	}
	if d, err = n.newDraft("making"); err != nil {
		t.Fatalf("the name is still taken: %v", err)
	}
	d.abandon()
}

// A VM whose process died before it was ready is a failed start: its name is free.
func TestDeadBeforeReady(t *testing.T) {
	n := open(t)
	d, err := n.newDraft("early")
	if err != nil {
		t.Fatal(err)
	}
	d.record.PID, d.record.Started = 1<<22+1, 1
	if err := d.write(); err != nil {
		t.Fatal(err)
	}
	if vms, err := n.List(); err != nil || len(vms) != 1 {
		t.Errorf("while its maker is at work: %d vms, %v", len(vms), err)
	}
	d.lock.Close() // as if its maker had died
	if vms, err := n.List(); err != nil || len(vms) != 0 || exists(d.dir) {
		t.Errorf("afterwards: %d vms, %v", len(vms), err)
	}
	if d, err = n.newDraft("early"); err != nil {
		t.Fatalf("the name is still taken: %v", err)
	}
	d.abandon()
}

func TestRunDirectoryTooLongForSockets(t *testing.T) {
	_, err := Open(Config{DataDir: t.TempDir(), RunDir: "/tmp/" + strings.Repeat("x", 100)})
	if !failure.Is(err, failure.InvalidArgument) || !strings.Contains(err.Error(), "too long") {
		t.Errorf("got %v", err)
	}
}

// A VM process that dies or hangs at the start leaves an error and nothing else.
func TestFailedLaunchLeavesNothing(t *testing.T) {
	if f, err := openKVM(); err != nil {
		testkit.Require(t, "kvm", "needs /dev/kvm: "+err.Error())
	} else {
		f.Close()
	}
	n := open(t)
	for how, want := range map[string]struct {
		code   failure.Code
		within time.Duration
	}{"dies": {failure.VMProcessGone, time.Minute}, "hangs": {failure.Cancelled, slowStart / 2}} {
		t.Setenv(behaviour, how)
		ctx, cancel := context.WithTimeout(context.Background(), want.within)
		vm, err := n.launch(ctx, Options{Name: "victim", ReadyTimeout: time.Minute}, plan{
			checkpoint: &machine.Checkpoint{},
			origin:     func(*Record) {},
		})
		cancel()
		if vm != nil || !failure.Is(err, want.code) {
			t.Errorf("process that %s: %v", how, err)
		}
		for _, dir := range []string{n.vmsDir(), n.namesDir()} {
			if entries, _ := os.ReadDir(dir); len(entries) != 0 {
				t.Errorf("process that %s left %d entries in %s", how, len(entries), dir)
			}
		}
	}
}

func TestUnknownNamesAreTyped(t *testing.T) {
	n := open(t)
	ctx := context.Background()
	if _, err := n.Boot(ctx, "none", Options{CPUs: 1, MemoryBytes: 64 << 20}); !failure.Is(err, failure.ImageNotFound) {
		t.Errorf("boot: %v", err)
	}
	if _, err := n.Restore(ctx, "none", Options{}); !failure.Is(err, failure.SnapshotNotFound) {
		t.Errorf("restore: %v", err)
	}
	if err := n.RemoveSnapshot("none"); !failure.Is(err, failure.SnapshotNotFound) {
		t.Errorf("remove snapshot: %v", err)
	}
	if err := n.RemoveImage("none"); !failure.Is(err, failure.ImageNotFound) {
		t.Errorf("remove image: %v", err)
	}
	if _, err := n.Boot(ctx, "none", Options{CPUs: 1, MemoryBytes: 1 << 50}); !failure.Is(err, failure.InvalidArgument) {
		t.Errorf("more memory than the host has: %v", err)
	}
	var e *failure.Error
	if _, err := n.Find("none"); !errors.As(err, &e) || e.Retryable {
		t.Errorf("find: %v", err)
	}
}

// What one process has seen a guest do, another need not find out.
func TestProvenIsForAllProcesses(t *testing.T) {
	n := open(t)
	if n.proven() {
		t.Fatal("proven before any guest has answered")
	}
	n.prove()
	other, err := Open(n.config)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if !n.proven() || !other.proven() {
		t.Errorf("proven: %v here, %v elsewhere", n.proven(), other.proven())
	}
}
