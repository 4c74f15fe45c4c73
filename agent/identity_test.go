package agent_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
)

// Cases A1 to A3 on a real kernel. It gives the machine another identity, so
// it runs where the machine is thrown away afterwards.
func TestA3RenewThisMachine(t *testing.T) {
	inLab(t, "changes the identity of the machine that it runs on")
	g := start(t, agent.Config{Identity: agent.NewIdentity(t.TempDir())})
	const path = "/proc/sys/kernel/random/boot_id"
	t.Cleanup(func() { unix.Unmount(path, 0) })
	seen := map[string]bool{}
	offset := time.Hour
	for range 3 { // a clone, its clone, and that one's
		seen[read(t, path)] = true
		r, err := g.Renew(context.Background(), client.Identity{
			Generation: generationA, Entropy: make([]byte, 64), Hostname: "renewed", BootID: true,
			MachineID: strings.Repeat("5e", 16),
			WallClock: func() time.Time { return time.Now().Add(offset) },
		})
		if err != nil {
			t.Fatal(err)
		}
		if id := read(t, path); id != r.BootID || seen[id] {
			t.Errorf("boot id %q, want the confirmed %q and a new one", id, r.BootID)
		}
		if name := read(t, "/proc/sys/kernel/hostname"); name != "renewed" {
			t.Errorf("hostname %q", name)
		}
		offset = 0
	}
	mounts := 0
	for line := range strings.Lines(read(t, "/proc/self/mounts")) {
		if strings.Contains(line, path) {
			mounts++
		}
	}
	if mounts != 1 {
		t.Errorf("%d mounts over the boot id, want 1", mounts)
	}
	if up, now := time.Since(begun), time.Now().Round(0).Sub(begun.Round(0)); now-up < 59*time.Minute || now-up > 61*time.Minute {
		t.Errorf("the clock moved by %v, want an hour", now-up)
	}
	if _, err := g.Renew(context.Background(), client.Identity{Generation: generationB, WallClock: func() time.Time { return time.Now().Add(-time.Hour) }}); err != nil {
		t.Error(err)
	}
}

// inLab skips a test that is for the lab machine only. RequireKVM is what marks
// the tests that are run there.
func inLab(t *testing.T, why string) {
	t.Helper()
	if !testkit.InLab() {
		testkit.Require(t, "lab", why+": run it in the lab (make test-lab)")
	}
	testkit.RequireKVM(t)
}

// begun has a monotonic reading, which a change of the clock leaves alone.
var begun = time.Now()

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}
