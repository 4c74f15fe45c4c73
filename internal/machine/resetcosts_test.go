package machine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/testkit"
)

// TestResetCosts prints what the phases of a reset cost after lives that have
// dirtied more and more pages, and that more lives cost no more.
func TestResetCosts(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	id := NewIdentity("clone", TimeHost)
	m := clone(t, bootCheckpoint(t, ctx), id)
	bring(t, ctx, m, id)
	for _, blocks := range []int{0, 0, 300, 600, 10000} {
		costs := phaseCosts{}
		var changed []int
		for range 5 {
			if blocks > 0 {
				run(t, ctx, m, fmt.Sprintf("dd if=/dev/zero of=/dev/shm/x bs=4k count=%d 2>/dev/null", blocks))
			}
			changed = append(changed, changedPages(t, m))
			id = id.Next()
			begin := linux.Monotonic()
			timeline, err := m.Reset(ctx, target(t, m, id, nil))
			if err != nil {
				t.Fatal(err)
			}
			costs.add(begin, timeline)
		}
		t.Logf("%d pages changed: %v", median(changed), costs)
	}
	var again []time.Duration
	for range 5 {
		id = id.Next()
		begin := linux.Monotonic()
		if _, err := m.Agent().Renew(ctx, client.Identity{Generation: id.Generation, Entropy: random(64), WallClock: time.Now, Hostname: "clone", BootID: true}); err != nil {
			t.Fatal(err)
		}
		again = append(again, linux.Monotonic()-begin)
	}
	t.Logf("renewal of a guest that was not reset: %v", median(again))
	steps := phaseCosts{}
	for range 5 {
		if err := m.Pause(); err != nil {
			t.Fatal(err)
		}
		var timeline Timeline
		begin := linux.Monotonic()
		changedPages(t, m)
		timeline.End("scan")
		if err := m.layers.reset(m.memory); err != nil {
			t.Fatal(err)
		}
		timeline.End("memory, nothing written")
		if err := m.Machine.Reset(m.origin); err != nil {
			t.Fatal(err)
		}
		timeline.End("state")
		steps.add(begin, timeline)
	}
	t.Logf("paused: %v", steps)
}

func changedPages(t *testing.T, m *Machine) (pages int) {
	t.Helper()
	private, err := m.memory.Private()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range private {
		pages += int(e.Count)
	}
	return pages
}

// phaseCosts collects timelines of the same phases.
type phaseCosts struct {
	names []string
	times [][]time.Duration
}

func (c *phaseCosts) add(begin time.Duration, t Timeline) {
	total := t[len(t)-1].At - begin
	last := begin
	for i, mark := range append(t, Mark{Phase: "all"}) {
		if i == len(c.names) {
			c.names, c.times = append(c.names, mark.Phase), append(c.times, nil)
		}
		spent := mark.At - last
		if mark.Phase == "all" {
			spent = total
		}
		c.times[i] = append(c.times[i], spent)
		last = mark.At
	}
}

func (c phaseCosts) String() string {
	var parts []string
	for i, name := range c.names {
		parts = append(parts, fmt.Sprintf("%s %v (first %v, most %v)", name, median(c.times[i]), c.times[i][0], slices.Max(c.times[i])))
	}
	return strings.Join(parts, ", ")
}

func median[T int | time.Duration](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
