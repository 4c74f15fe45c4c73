package forkvm_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/vmm"
)

// TestLargeMachine boots 4 vCPUs with RAM on both sides of the hole below
// 4 GiB, and clones it with data in the upper part.
func TestLargeMachine(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	const memory = 6 << 30
	vm, err := forkvm.Boot(ctx, openImage(t, "memory"), config(t, forkvm.Config{Name: "large", CPUs: 4, MemoryBytes: memory}))
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, vm)
	if cpus := sh(t, ctx, vm, "nproc"); cpus != "4" {
		t.Errorf("guest sees %s CPUs, not 4", cpus)
	}
	kib, err := strconv.Atoi(sh(t, ctx, vm, "awk '/^MemTotal/ { print $2 }' /proc/meminfo"))
	if err != nil || kib < memory>>10*94/100 {
		t.Errorf("guest sees %d KiB (%v) of %d", kib, err, memory>>10)
	}
	// Linux gives out memory from the highest zone first.
	sh(t, ctx, vm, "dd if=/dev/urandom of=/dev/shm/data bs=1M count=4 2>/dev/null")
	sum := sh(t, ctx, vm, "sha256sum </dev/shm/data")
	clone := fork(t, ctx, vm, forkvm.Config{Name: "clone"})[0]
	if got := sh(t, ctx, clone, "sha256sum </dev/shm/data; nproc"); got != sum+"\n4" {
		t.Errorf("clone has %q, its parent %q", got, sum)
	}
}

// TestForkSourceGoesOn forks a guest under load: the source goes on as if
// nothing had happened, and nothing that one writes is seen by another.
func TestForkSourceGoesOn(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "source"})
	startLoad(t, ctx, vm)
	sh(t, ctx, vm, "echo source > /root/disk; echo source > /dev/shm/memory")
	children := fork(t, ctx, vm, forkvm.Config{Name: "left"}, forkvm.Config{Name: "right"})
	all := append([]*forkvm.VM{vm}, children...)
	for i, vm := range all {
		if got := sh(t, ctx, vm, "cat /root/disk /dev/shm/memory"); got != "source\nsource" {
			t.Errorf("machine %d begins with %q", i, got)
		}
		sh(t, ctx, vm, fmt.Sprintf("echo %d > /root/disk; echo %d > /dev/shm/memory; sync", i, i))
	}
	for i, vm := range all {
		if err := loadGoesOn(ctx, vm); err != nil {
			t.Errorf("machine %d: %v", i, err)
		}
		want := fmt.Sprintf("%d\n%d", i, i)
		if got := sh(t, ctx, vm, "echo 3 > /proc/sys/vm/drop_caches; cat /root/disk /dev/shm/memory"); got != want {
			t.Errorf("machine %d has %q, not %q", i, got, want)
		}
	}
}

// TestPauseAndResume checks that a paused guest stands still, that doubled calls
// change nothing, and that a snapshot of a paused guest leaves it paused.
func TestPauseAndResume(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "paused"})
	for range 2 {
		if err := vm.Pause(); err != nil {
			t.Fatal(err)
		}
	}
	own := openStore(t)
	takeSnapshot(t, ctx, vm, own, "paused")
	silent, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := vm.Agent().Ping(silent); err == nil {
		t.Error("a paused guest answers")
	}
	for range 2 {
		if err := vm.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	sh(t, ctx, vm, "true")
	clone := restore(t, ctx, own, "paused", forkvm.Config{Name: "clone"})
	sh(t, ctx, clone, "true")
}

// TestHowGuestsEnd lets guests end in every way that they have, and checks what
// is reported.
func TestHowGuestsEnd(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	cases := []struct {
		name string
		end  func(t *testing.T, vm *forkvm.VM)
		want vmm.Reason
	}{
		{"panic", func(t *testing.T, vm *forkvm.VM) {
			sh(t, ctx, vm, "(sleep 0.2; echo c > /proc/sysrq-trigger) >/dev/null 2>&1 & true")
		}, vmm.ReasonGuestPanic},
		{"power-off", func(t *testing.T, vm *forkvm.VM) { shutdown(t, ctx, vm, false) }, vmm.ReasonShutdown},
		{"reboot", func(t *testing.T, vm *forkvm.VM) { shutdown(t, ctx, vm, true) }, vmm.ReasonReset},
		{"poweroff command", func(t *testing.T, vm *forkvm.VM) {
			sh(t, ctx, vm, "(sleep 0.2; poweroff -f) >/dev/null 2>&1 & true")
		}, vmm.ReasonShutdown},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			vm := restore(t, ctx, st, name, forkvm.Config{Name: "ends"})
			if vm.Exit() != nil {
				t.Fatalf("a running guest has ended: %v", vm.Exit())
			}
			c.end(t, vm)
			select {
			case <-vm.Done():
			case <-ctx.Done():
				t.Fatal("guest does not end")
			}
			checkExit(t, vm.Exit(), c.want)
			if _, err := vm.Agent().Ping(ctx); err == nil {
				t.Error("a guest that has ended answers")
			}
			if err := vm.Pause(); err == nil {
				t.Error("a guest that has ended can be paused")
			}
		})
	}
}

func shutdown(t *testing.T, ctx context.Context, vm *forkvm.VM, reboot bool) {
	t.Helper()
	if _, err := vm.Agent().Shutdown(ctx, reboot); err != nil {
		t.Fatal(err)
	}
}

func checkExit(t *testing.T, exit *vmm.Exit, want vmm.Reason) {
	t.Helper()
	if exit.Reason != want {
		t.Errorf("ended by %s (%s), not %s", exit.Reason, exit.Detail, want)
	}
	if want.Orderly() {
		return
	}
	if lines := strings.Join(exit.Console, "\n"); !strings.Contains(lines, "Kernel panic - not syncing: sysrq triggered crash") {
		t.Errorf("console lines do not show the panic:\n%s", lines)
	}
	if !strings.Contains(exit.Registers, "RIP: ") || exit.VCPU < 0 {
		t.Errorf("no registers (vCPU %d): %q", exit.VCPU, exit.Registers)
	}
}

// TestKilledByItsOwner closes a machine in the middle of a command.
func TestKilledByItsOwner(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "killed"})
	process, err := vm.Agent().Start(ctx, client.Command{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.Close(); err != nil {
		t.Error(err)
	}
	if _, err := process.Wait(); err == nil {
		t.Error("the command of a killed machine ended well")
	}
	if exit := vm.Exit(); exit == nil || exit.Reason != vmm.ReasonKilled {
		t.Errorf("exit %v, want %s", exit, vmm.ReasonKilled)
	}
	if err := vm.Close(); err != nil {
		t.Errorf("closed twice: %v", err)
	}
}

// TestBalloon: a guest gives memory up and takes it back when its host asks, in a clone
// of a guest with a balloon too.
func TestBalloon(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "giver"})
	free := func(vm running) int {
		t.Helper()
		kib, err := strconv.Atoi(sh(t, ctx, vm, "awk '/^MemFree/ { print $2 }' /proc/meminfo"))
		if err != nil {
			t.Fatal(err)
		}
		return kib << 10
	}
	wait := func(what string, vm *forkvm.VM, done func(forkvm.Balloon) bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !done(vm.Balloon()); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", what, vm.Balloon())
			}
		}
	}
	const given = 32 << 20
	before := free(vm)
	vm.SetBalloon(given)
	wait("inflate", vm, func(b forkvm.Balloon) bool { return b.Target == given && b.Inflated >= given })
	if left := free(vm); left > before-given*3/4 {
		t.Errorf("%d bytes are free in the guest, and %d with %d in the balloon", before, left, given)
	}
	clone := fork(t, ctx, vm, forkvm.Config{Name: "taker"})[0]
	clone.SetBalloon(0)
	wait("deflate", clone, func(b forkvm.Balloon) bool { return b.Target == 0 && b.Deflated >= given })
	// The guest's kernel tells the host first and frees the pages then.
	wait("free", clone, func(forkvm.Balloon) bool { return free(clone) > before-given/4 })
	if b := vm.Balloon(); b.Target != given || b.Deflated != 0 {
		t.Errorf("its parent's: %+v", b)
	}
}
