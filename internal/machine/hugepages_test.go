package machine

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

// clonesInHugePages has a clone, and its child, map what the working set says is read in
// huge pages. That changes nothing in their memory, before they run and after a reset.
func clonesInHugePages(t *testing.T, ctx context.Context, st *store.Store, name string, set *snapshot.WorkingSet) {
	t.Helper()
	if len(set.Read) == 0 {
		t.Fatal("a clone reads nothing that it does not write, not even its kernel's code")
	}
	checkpoint, _, err := FromStore(ctx, st, name, false)
	if err != nil {
		t.Fatal(err)
	}
	defer checkpoint.Close()
	id := NewIdentity("clone", TimeHost)
	small := clone(t, checkpoint, id)
	ram, disk := ramOf(t, small), diskOf(t, small)
	if err := small.Close(); err != nil {
		t.Fatal(err)
	}

	checkpoint.HugePages = hugePagesOf(t, checkpoint.Memory, set)
	m := clone(t, checkpoint, id)
	ramOf(t, m).compare(t, "a clone that has not begun", ram)
	bring(t, ctx, m, id)
	run(t, ctx, m, "true")
	mapped := mappedHuge(t)
	t.Logf("%d of %d huge pages are mapped", mapped, len(set.Read))
	if mapped == 0 {
		t.Error("a clone maps no huge page")
	}
	childID := NewIdentity("child", TimeHost)
	child := clone(t, take(t, m), childID)
	if child.layers.huge == nil {
		t.Error("a child has no huge pages")
	}
	bring(t, ctx, child, childID)
	run(t, ctx, child, "true")
	checkRewound(t, ctx, m, target(t, m, id.Next(), nil), ram, disk)
	run(t, ctx, m, "true")
}

// hugePagesOf makes the file as a launcher does.
func hugePagesOf(t *testing.T, stack []*layer.Layer, set *snapshot.WorkingSet) *HugePages {
	t.Helper()
	f, err := linux.MemoryFile("huge")
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, snapshot.HugePageSize)
	for i, page := range set.Read {
		if err := layer.ReadUnits(stack, page, buf); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(buf, snapshot.HugePageOffset(i)); err != nil {
			t.Fatal(err)
		}
		if err := linux.Collapse(f, snapshot.HugePageOffset(i), snapshot.HugePageSize); err != nil {
			t.Fatal(err)
		}
	}
	header, err := (&snapshot.HugePages{Snapshot: set.Snapshot, RAM: set.RAM, Pages: set.Read}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(header, 0); err != nil {
		t.Fatal(err)
	}
	h, err := OpenHugePages(f, len(stack))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// mappedHuge counts the huge pages of files in memory that this process has mapped.
func mappedHuge(t *testing.T) int {
	t.Helper()
	all, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(all) {
		var kilobytes int
		if n, _ := fmt.Sscanf(string(line), "ShmemPmdMapped: %d kB", &kilobytes); n == 1 {
			return kilobytes << 10 / snapshot.HugePageSize
		}
	}
	return 0
}
