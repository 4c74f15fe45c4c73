package machine

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/testkit"
)

// pauseLimit is how long a guest may stand still for a checkpoint of a thousand
// pages, here where it was booted and has touched all of its memory's pages itself:
// looking through those takes most of the time.
const pauseLimit = 10 * time.Millisecond

// TestPauseOfACheckpoint: a guest that has written a thousand pages since the last
// checkpoint stands still for a short time only.
func TestPauseOfACheckpoint(t *testing.T) {
	testkit.RequireKVM(t)
	dir := testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	img, err := image.Open(filepath.Join(dir, "disk"))
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, kernel, err := FromImage(img, "disk", Size{CPUs: 1, MemoryBytes: 512 << 20})
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Kernel: kernel}
	checkpoint.Configure(&c)
	id := NewIdentity("source", TimeHost)
	m := build(t, c, id)
	if err := m.Bring(ctx, id); err != nil {
		t.Fatal(err)
	}
	write := func(blocks int) {
		t.Helper()
		script := fmt.Sprintf("dd if=/dev/urandom of=/dev/shm/x bs=4k count=%d conv=notrunc 2>/dev/null", blocks)
		if _, err := m.Agent().Exec(ctx, client.Command{Args: []string{"/bin/sh", "-c", script}}); err != nil {
			t.Fatal(err)
		}
	}
	take := func() *Checkpoint {
		t.Helper()
		tops, err := NewTops(m.Shape(), t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		c, err := m.Checkpoint(tops)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	write(1000)
	take() // everything since the boot
	shortest := time.Hour
	for range 5 {
		write(800)
		begun := time.Now()
		c := take()
		t.Logf("%d pages in %v, all of it in %v", c.Memory[len(c.Memory)-1].Stored(), c.Pause, time.Since(begun))
		shortest = min(shortest, c.Pause)
	}
	if shortest > pauseLimit {
		t.Errorf("the shortest of five pauses took %v", shortest)
	}
	t.Logf("idle: %v", take().Pause)
}
