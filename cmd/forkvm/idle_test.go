package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// idlers is how many idle clones one processor could have, guests and processes
// together, and do nothing else: beside 1,000 there are three quarters of it left.
const idlers = 4500

// TestIdleClonesSleep: what a clone is woken up for while nobody asks it anything.
func TestIdleClonesSleep(t *testing.T) {
	testkit.RequireCounted(t)
	h := newHost(t, "")
	vm := h.start("idle")
	h.sh("idle", "true")
	time.Sleep(10 * time.Second) // what the command has put off; no wall time where it is counted

	const watched = 30 * time.Second
	before := processorTime(t, vm.PID)
	time.Sleep(watched)
	taken := processorTime(t, vm.PID) - before
	t.Logf("%v of %v", taken, watched)
	if limit := watched / idlers; taken > limit {
		t.Errorf("an idle clone took %v of %v, more than %v", taken, watched, limit)
	}
}

// processorTime is what all threads of a process have had so far, without those that ended.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("process %d has no threads: %v", pid, err)
	}
	var sum time.Duration
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var running time.Duration // in nanoseconds: Documentation/scheduler/sched-stats.rst
		if _, err := fmt.Sscan(string(text), &running); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		sum += running
	}
	return sum
}
