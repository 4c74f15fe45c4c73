package machine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/vmm/boot/acpi"
	"github.com/forkvm/forkvm/vmm/memory"
)

// judgeMemory is the RAM of the guests here: all of it is compared byte for byte.
const judgeMemory = 160 << 20

// TestClonesOfCheckpoints: the memory and the disk of a clone that has not run yet
// are those of its parent, byte for byte, and so is what a plain reader makes of
// the layers.
func TestClonesOfCheckpoints(t *testing.T) {
	testkit.Long(t)
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	source := bootSource(t, ctx)
	var before contents
	for round := range 3 {
		time.Sleep(300 * time.Millisecond)
		if err := source.Pause(); err != nil {
			t.Fatal(err)
		}
		ram, disk := ramOf(t, source), diskOf(t, source)
		time.Sleep(500 * time.Millisecond)
		diskOf(t, source).compare(t, fmt.Sprintf("round %d: disk of a paused machine", round), disk)
		ramOf(t, source).compare(t, fmt.Sprintf("round %d: memory of a paused machine", round), ram)
		judge(t, source, round, ram, disk, before)
		before = ram
		if err := source.Resume(); err != nil {
			t.Fatal(err)
		}
		if _, err := source.Agent().Ping(ctx); err != nil {
			t.Errorf("round %d: source: %v", round, err)
		}
	}
}

// bootSource boots a guest with a disk and has it write to memory and disk.
func bootSource(t *testing.T, ctx context.Context) *Machine {
	t.Helper()
	m := bootDisk(t, ctx, judgeMemory)
	script := "while :; do dd if=/dev/urandom of=/root/data bs=4k count=50 conv=fsync; cp /root/data /dev/shm/data; sync; done >/dev/null 2>&1 & true"
	if _, err := m.Agent().Exec(ctx, client.Command{Args: []string{"/bin/sh", "-c", script}}); err != nil {
		t.Fatal(err)
	}
	return m
}

func build(t *testing.T, c Config, id Identity) *Machine {
	t.Helper()
	system, err := kvm.Open()
	if err != nil {
		t.Fatal(errors.Join(err, c.Close()))
	}
	defer system.Close()
	if c.Prepared, err = Prepare(system, c.Shape.CPUs); err != nil {
		t.Fatal(errors.Join(err, c.Close()))
	}
	if c.Generation, err = id.GenerationID(); err != nil {
		t.Fatal(err)
	}
	if c.Tops, err = NewTops(c.Shape, t.TempDir()); err != nil {
		t.Fatal(errors.Join(err, c.Close()))
	}
	plug(t, &c, id)
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return m
}

// judge takes a checkpoint of a paused machine and compares.
func judge(t *testing.T, source *Machine, round int, ram, disk, before contents) {
	t.Helper()
	tops, err := NewTops(source.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, err := source.Checkpoint(tops)
	if err != nil {
		t.Fatal(err)
	}
	defer checkpoint.Close()
	if !source.Paused() {
		t.Errorf("round %d: a paused machine runs after a checkpoint", round)
	}
	laidOver(t, checkpoint.Memory, judgeMemory).compare(t, fmt.Sprintf("round %d: memory layers", round), ram)
	laidOver(t, checkpoint.Disks[0], source.Shape().Disks[0].Size).compare(t, fmt.Sprintf("round %d: disk layers", round), disk)
	newest := checkpoint.Memory[len(checkpoint.Memory)-1]
	t.Logf("round %d: %d pages differ from the round before, the new layer has %d, cut in %v",
		round, len(ram.differing(before)), newest.Stored(), checkpoint.Pause)

	own, err := checkpoint.Clone()
	if err != nil {
		t.Fatal(err)
	}
	var c Config
	own.Configure(&c)
	clone := build(t, c, NewIdentity("clone", TimeHost))
	diskOf(t, clone).compare(t, fmt.Sprintf("round %d: the clone's disk", round), disk)
	// The one page that may differ, and has to, is that of the generation id.
	const generationPage = acpi.GenerationIDAddress / memory.PageSize
	if pages := ramOf(t, clone).differing(ram); len(pages) != 1 || pages[0] != generationPage {
		t.Errorf("round %d: pages %x of the clone's memory differ, want %#x only", round, pages, generationPage)
	}
	if err := clone.Close(); err != nil {
		t.Error(err)
	}
}

// TestCheckpointOfAClosedMachine checks that what cannot be a checkpoint takes no
// file along.
func TestCheckpointOfAClosedMachine(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	m := buildDisk(t, Size{CPUs: 1, MemoryBytes: judgeMemory}, NewIdentity("closed", TimeHost))
	if _, err := m.Checkpoint(nil); err == nil || !strings.Contains(err.Error(), "0 new top layers for 1 disks") {
		t.Errorf("checkpoint without a new top layer: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	tops, err := NewTops(m.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Checkpoint(tops); err == nil {
		t.Error("a closed machine has a checkpoint")
	}
}

// TestManyCheckpoints: a machine that writes to its disk before each of many
// checkpoints keeps few layers of it, and a clone of the last has all that was
// written.
func TestManyCheckpoints(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	m := bootDisk(t, ctx, judgeMemory)
	const steps = 3*layer.MergeWidth + 2
	var want strings.Builder
	for step := range steps {
		fmt.Fprintln(&want, step)
		run(t, ctx, m, fmt.Sprintf("echo %d >> /root/steps; sync", step))
		c := take(t, m)
		if step == steps-1 {
			if layers := len(c.Disks[0]); layers > 8 {
				t.Errorf("the disk has %d layers after %d checkpoints", layers, steps)
			}
			laidOver(t, c.Disks[0], m.Shape().Disks[0].Size).compare(t, "disk layers", diskWhenFrozen(t, c))
			if got := run(t, ctx, cloneOf(t, ctx, c), "echo 3 > /proc/sys/vm/drop_caches; cat /root/steps"); got+"\n" != want.String() {
				t.Errorf("a clone has %q", got)
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := run(t, ctx, m, "echo 3 > /proc/sys/vm/drop_caches; cat /root/steps"); got+"\n" != want.String() {
		t.Errorf("the machine has %q", got)
	}
}

// diskWhenFrozen copies the disk of a clone that has not begun.
func diskWhenFrozen(t *testing.T, c *Checkpoint) contents {
	t.Helper()
	m := clone(t, c, NewIdentity("frozen", TimeHost))
	defer m.Close()
	return diskOf(t, m)
}
