package machine

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// pauseLimit is how long a clone may stand still for a checkpoint of a thousand
// pages.
const pauseLimit = 4 * time.Millisecond

// TestPauseOfACheckpoint: a guest that has written a thousand pages since the last
// checkpoint stands still for a short time only, one that was booted and has touched
// many pages a little longer than a clone.
func TestPauseOfACheckpoint(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	booted := bootDisk(t, ctx, 512<<20)
	step := func(name string, m *Machine, blocks int) *Checkpoint {
		t.Helper()
		run(t, ctx, m, fmt.Sprintf("dd if=/dev/urandom of=/dev/shm/x bs=4k count=%d conv=notrunc 2>/dev/null", blocks))
		begun := time.Now()
		c := take(t, m)
		t.Logf("%s: %d pages in %v, all of it in %v", name, c.Memory[len(c.Memory)-1].Stored(), c.Pause, time.Since(begun))
		return c
	}
	first := step("booted, first", booted, 1000)
	for range 3 {
		step("booted", booted, 800)
	}
	clone := cloneOf(t, ctx, first)
	// The median: a test's process has more garbage to collect than a VM's, now and then in a pause. TestBudget holds the
	// longest pause of a VM's own.
	var pauses []time.Duration
	for range 5 {
		pauses = append(pauses, step("clone", clone, 800).Pause)
	}
	slices.Sort(pauses)
	if median, longest := pauses[len(pauses)/2], pauses[len(pauses)-1]; median > pauseLimit || longest > pauseLimit*3/2 {
		t.Errorf("a clone's pauses took %v", pauses)
	}
	t.Logf("idle: %v", take(t, clone).Pause)
}
