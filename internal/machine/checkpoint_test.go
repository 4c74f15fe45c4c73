package machine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
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
	var before []byte
	for round := range 3 {
		time.Sleep(300 * time.Millisecond)
		if err := source.Pause(); err != nil {
			t.Fatal(err)
		}
		ram, disk := dumpMemory(t, source), hashDisk(t, source)
		time.Sleep(500 * time.Millisecond)
		if again := hashDisk(t, source); again != disk {
			t.Errorf("round %d: the disk of a paused machine changes", round)
		}
		if !bytes.Equal(ram, dumpMemory(t, source)) {
			t.Errorf("round %d: the memory of a paused machine changes", round)
		}
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
func judge(t *testing.T, source *Machine, round int, ram []byte, disk [sha256.Size]byte, before []byte) {
	t.Helper()
	tops, err := NewTops(source.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, err := source.Checkpoint(tops, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer checkpoint.Close()
	if !source.Paused() {
		t.Errorf("round %d: a paused machine runs after a checkpoint", round)
	}
	if !bytes.Equal(merge(t, checkpoint.Memory, judgeMemory), ram) {
		t.Errorf("round %d: the memory layers are not the memory", round)
	}
	if sha256.Sum256(merge(t, checkpoint.Disks[0], source.Shape().Disks[0].Size)) != disk {
		t.Errorf("round %d: the disk layers are not the disk", round)
	}
	newest := checkpoint.Memory[len(checkpoint.Memory)-1]
	t.Logf("round %d: %d pages differ from the round before, the new layer has %d, cut in %v",
		round, len(differing(before, ram)), newest.Stored(), checkpoint.Pause)

	own, err := checkpoint.Clone()
	if err != nil {
		t.Fatal(err)
	}
	var c Config
	own.Configure(&c)
	clone := build(t, c, NewIdentity("clone", TimeHost))
	if hashDisk(t, clone) != disk {
		t.Errorf("round %d: the clone's disk is not its parent's", round)
	}
	// The one page that may differ, and has to, is that of the generation id.
	const generationPage = acpi.GenerationIDAddress / memory.PageSize
	if pages := differing(ram, dumpMemory(t, clone)); len(pages) != 1 || pages[0] != generationPage {
		t.Errorf("round %d: pages %x of the clone's memory differ, want %#x only", round, pages, generationPage)
	}
	if err := clone.Close(); err != nil {
		t.Error(err)
	}
}

func dumpMemory(t *testing.T, m *Machine) []byte {
	t.Helper()
	var b bytes.Buffer
	b.Grow(judgeMemory)
	if err := m.memory.Dump(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func hashDisk(t *testing.T, m *Machine) [sha256.Size]byte {
	t.Helper()
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(m.disks[0], 0, m.disks[0].Size())); err != nil {
		t.Fatal(err)
	}
	return [sha256.Size]byte(sum.Sum(nil))
}

// merge lays layers over each other in the plainest way there is.
func merge(t *testing.T, layers []*layer.Layer, size int64) []byte {
	t.Helper()
	flat := make([]byte, size)
	for _, l := range layers {
		for _, e := range l.Extents() {
			part := flat[e.Start*memory.PageSize : min(uint64(size), (e.Start+e.Count)*memory.PageSize)]
			if e.Offset < 0 {
				clear(part)
			} else if _, err := l.File().ReadAt(part, e.Offset); err != nil {
				t.Fatal(err)
			}
		}
	}
	return flat
}

// differing returns the numbers of the pages that differ.
func differing(a, b []byte) (pages []int) {
	for i := 0; i < min(len(a), len(b)); i += memory.PageSize {
		if !bytes.Equal(a[i:i+memory.PageSize], b[i:i+memory.PageSize]) {
			pages = append(pages, i/memory.PageSize)
		}
	}
	return pages
}

// TestCheckpointOfAClosedMachine checks that what cannot be a checkpoint takes no
// file along.
func TestCheckpointOfAClosedMachine(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	m := buildDisk(t, judgeMemory, NewIdentity("closed", TimeHost))
	if _, err := m.Checkpoint(nil, nil); err == nil || !strings.Contains(err.Error(), "0 new top layers for 1 disks") {
		t.Errorf("checkpoint without a new top layer: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	tops, err := NewTops(m.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Checkpoint(tops, nil); err == nil {
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
			if sha256.Sum256(merge(t, c.Disks[0], m.Shape().Disks[0].Size)) != diskWhenFrozen(t, c) {
				t.Error("the disk layers are not the disk of a clone")
			}
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

// diskWhenFrozen hashes the disk of a clone that has not begun.
func diskWhenFrozen(t *testing.T, c *Checkpoint) [sha256.Size]byte {
	t.Helper()
	m := clone(t, c, NewIdentity("frozen", TimeHost))
	defer m.Close()
	return hashDisk(t, m)
}
