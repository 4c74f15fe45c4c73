package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// TestStepCosts prints what storing a step costs behind the pause, as
// docs/cost-model.md has it: so many new pages, and as many blocks, on top of a
// stack that the store has, in a store of so many snapshots.
func TestStepCosts(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireCounted(t)
	costs := map[string]time.Duration{}
	for _, c := range []stepCase{
		{1, 1, 0}, {1, 251, 0}, {layer.MergeWidth - 2, 1, 0}, {1, 1, 200},
	} {
		best := c.cost(t)
		costs[fmt.Sprint(c)] = best
		t.Logf("%d layers below, %d new pages and blocks, %d other snapshots: %v", c.depth, c.pages, c.others, best)
	}
	base := costs["{1 1 0}"]
	t.Logf("%v for a page and a block more", (costs["{1 251 0}"]-base)/250)
	t.Logf("%v for a layer of memory and of the disk more below", (costs[fmt.Sprintf("{%d 1 0}", layer.MergeWidth-2)]-base)/(layer.MergeWidth-3))
	t.Logf("%v for another snapshot in the store", (costs["{1 1 200}"]-base)/200)
}

type stepCase struct{ depth, pages, others int }

// cost is the least of a few tries.
func (c stepCase) cost(t *testing.T) time.Duration {
	t.Helper()
	s := openStore(t, t.TempDir())
	m := &machine{}
	t.Cleanup(m.close)
	for range c.depth {
		if err := m.grow(1); err != nil {
			t.Fatal(err)
		}
	}
	for i := range c.others {
		publishStep(t, s, m, fmt.Sprint("other-", i), nil)
	}
	publishStep(t, s, m, "base", nil)
	best := time.Duration(1 << 62)
	for i := range 5 {
		closeAll(m.memory[c.depth:])
		closeAll(m.disk[c.depth:])
		m.memory, m.disk = m.memory[:c.depth], m.disk[:c.depth]
		if err := m.grow(uint64(c.pages)); err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		publishStep(t, s, m, fmt.Sprint("step-", i), []string{snapshot.NewID()})
		best = min(best, time.Since(begun))
	}
	return best
}
