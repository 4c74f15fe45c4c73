package forkvm_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/snapshot/store"
)

// TestSnapshotDuringBoot stops guests in the middle of their boot, before there
// is a guest agent that could prepare anything, and has clones of these moments
// boot to the end.
func TestSnapshotDuringBoot(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	for _, cpus := range []int{1, 4} {
		t.Run(fmt.Sprintf("%d vCPUs", cpus), func(t *testing.T) {
			_, name := parent(t, ctx, cpus)
			third := parents.booted[name] / 3
			source := newGuest(t, "disk", machine.Size{CPUs: cpus})
			source.build(t)
			if err := source.machine.Start(); err != nil {
				t.Fatal(err)
			}
			for moment := range 3 {
				if moment > 0 {
					time.Sleep(third)
				}
				clone := source.clone(t)
				// It takes the rest of the boot.
				if err := clone.machine.Bring(ctx, clone.id); err != nil {
					t.Fatalf("clone of a guest %v after its start: %v\n%s", time.Duration(moment)*third, err, clone.console)
				}
				if err := clone.machine.Close(); err != nil {
					t.Error(err)
				}
			}
			if err := source.machine.Bring(ctx, source.id); err != nil {
				t.Errorf("source: %v\n%s", err, source.console)
			}
		})
	}
}

// guest is a machine without the embedding API around it, which waits for the
// guest agent.
type guest struct {
	config  machine.Config
	machine *machine.Machine
	id      machine.Identity
	console *console
}

func newGuest(t *testing.T, image string, size machine.Size) *guest {
	t.Helper()
	size.MemoryBytes = guestMemory
	checkpoint, kernel, err := machine.FromImage(openImage(t, image), image, size)
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{config: machine.Config{Kernel: kernel}}
	checkpoint.Configure(&g.config)
	return g
}

// build makes the machine, which does not run yet.
func (g *guest) build(t *testing.T) {
	t.Helper()
	g.console = newConsole(t, "guest")
	g.config.Console = g.console
	g.id = machine.NewIdentity("guest", machine.TimeHost)
	system, err := kvm.Open()
	if err != nil {
		t.Fatal(errors.Join(err, g.config.Close()))
	}
	defer system.Close()
	g.config.Generation, err = g.id.GenerationID()
	if err == nil {
		g.config.Prepared, err = machine.Prepare(system, g.config.Shape.CPUs)
	}
	if err == nil {
		g.config.Tops, err = machine.NewTops(g.config.Shape, scratch)
	}
	if err != nil {
		t.Fatal(errors.Join(err, g.config.Close()))
	}
	if g.machine, err = machine.New(g.config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.machine.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// clone builds a machine from this one at this moment.
func (g *guest) clone(t *testing.T) *guest {
	t.Helper()
	tops, err := machine.NewTops(g.machine.Shape(), scratch)
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, err := g.machine.Checkpoint(tops)
	if err != nil {
		t.Fatal(err)
	}
	c := &guest{}
	checkpoint.Configure(&c.config)
	c.build(t)
	return c
}

// TestCaseC4 has clones of one snapshot write to the same places of the disk at
// once: each sees its own, and the snapshot stays what it was.
func TestCaseC4(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "source"})
	own := openStore(t)
	sh(t, ctx, vm, "for i in 0 1 2 3; do dd if=/dev/urandom of=/root/old$i bs=64k count=8; done 2>/dev/null; sync")
	sums := sh(t, ctx, vm, "sha256sum /root/old*")
	takeSnapshot(t, ctx, vm, own, "template")
	if err := vm.Close(); err != nil {
		t.Error(err)
	}
	before := hashFile(t, exportDisk(t, own, "template"))

	vms := restoreAll(t, ctx, own, "template", 3)
	each(t, vms, func(i int, vm *forkvm.VM) error {
		_, err := attempt(ctx, vm, fmt.Sprintf("rm /root/old%d; sync; for j in 0 1 2 3; do yes clone %d | head -c 1000000 > /root/new$j; done; sync", i, i))
		return err
	})
	each(t, vms, func(i int, vm *forkvm.VM) error {
		out, err := attempt(ctx, vm, fmt.Sprintf("echo 3 > /proc/sys/vm/drop_caches; cat /root/new* | grep -vc '^clone %d' || true; ls /root | wc -l", i))
		// Each file is cut in the middle of its last line, which the next one begins behind.
		if want := "0\n7"; err == nil && out != want {
			err = fmt.Errorf("foreign lines and files: %q, want %q", out, want)
		}
		return err
	})
	for i, vm := range vms {
		name := fmt.Sprintf("clone-%d", i)
		takeSnapshot(t, ctx, vm, own, name)
		checkFilesystem(t, exportDisk(t, own, name))
	}
	if after := hashFile(t, exportDisk(t, own, "template")); after != before {
		t.Error("the disk of the snapshot has changed under its clones")
	}
	again := restore(t, ctx, own, "template", forkvm.Config{Name: "again"})
	if got := sh(t, ctx, again, "echo 3 > /proc/sys/vm/drop_caches; sha256sum /root/old*"); got != sums {
		t.Errorf("restored again:\n%s\nwant\n%s", got, sums)
	}
	swapDisk(t, own, "template")
	if vm, err := forkvm.Restore(ctx, own, "template", config(t, forkvm.Config{Name: "swapped"})); err == nil {
		t.Error("a snapshot with another disk of the same size was restored")
		vm.Close()
	}
}

// swapDisk puts another file of the same size in the place of a snapshot's lowest
// disk layer.
func swapDisk(t *testing.T, st *store.Store, name string) {
	t.Helper()
	m, err := st.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	ref := m.Disks[0].Layers[0]
	path := filepath.Join(st.Path(), "snapshots", name, ref.File)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.Repeat([]byte("another "), int(ref.Bytes/8)), 0o444); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, ref.Bytes); err != nil {
		t.Fatal(err)
	}
}

// each runs a function for all machines at once.
func each(t *testing.T, vms []*forkvm.VM, do func(i int, vm *forkvm.VM) error) {
	t.Helper()
	errs := make([]error, len(vms))
	var all sync.WaitGroup
	for i, vm := range vms {
		all.Go(func() { errs[i] = do(i, vm) })
	}
	all.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("machine %d: %v", i, err)
		}
	}
}

func hashFile(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	return [sha256.Size]byte(sum.Sum(nil))
}
