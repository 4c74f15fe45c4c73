package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
)

// TestCaseE8: VMs that could exceed the memory limit of the control group that they
// would run in are refused first, a fork before its VM is paused, unless the caller
// says how much they will need. What a fork takes besides is for internal/machine.
func TestCaseE8(t *testing.T) {
	g := testkit.EnterGroup(t) // left when all VMs are gone
	h := newHost(t, "")
	vm := h.start("source")
	h.sh("source", "head -c 40000000 /dev/urandom > /dev/shm/data")
	leave := func(mib uint64) {
		t.Helper()
		used := g.Number("memory.current") - g.Stat("active_file") - g.Stat("inactive_file") - g.Stat("slab_reclaimable")
		g.Write("memory.max", strconv.FormatUint(used+mib<<20, 10))
	}

	leave(120) // the guest has 192 MiB of RAM
	frozen := memoryFiles(t, vm.PID)
	r := h.forkvm("fork", "source", "--name", "child", "-o", "json")
	var e struct {
		Error struct {
			Code      string
			Retryable bool
			Memory    struct {
				Group string
				Limit uint64 `json:"limit_bytes"`
				Used  uint64 `json:"used_bytes"`
				Need  uint64 `json:"need_bytes"`
			}
		}
	}
	if err := json.Unmarshal([]byte(r.stderr), &e); err != nil || e.Error.Code != "memory_limit" || !e.Error.Retryable {
		t.Fatalf("%v: %v", err, r)
	}
	m := e.Error.Memory
	if m.Group != strings.TrimPrefix(g.Path, "/sys/fs/cgroup") || m.Limit != g.Number("memory.max") || m.Need <= 192<<20 || m.Used+m.Need <= m.Limit {
		t.Errorf("%+v", m)
	}
	t.Log(r.stderr)
	if now := memoryFiles(t, vm.PID); now != frozen {
		t.Errorf("the VM has %d memory files, and %d after a fork that was refused: it was paused", frozen, now)
	}
	h.refused("memory_limit", "create", slowly, "--snapshot", "base", "--name", "child")
	h.refused("memory_limit", "create", slowly, "--name", "child", "--memory", guestMemory, h.image("disk"))
	h.refused("memory_limit", "fork", "source", "--headroom", "60M", "--name", "child")

	h.must("fork", slowly, "source", "--headroom", "20M", "--name", "child")
	h.must("create", slowly, "--snapshot", "base", "--headroom", "0", "--name", "unlimited")
	h.sh("child", "sha256sum /dev/shm/data")

	leave(18)
	h.refused("memory_limit", "snapshot", "source", "s")
	leave(400)
	h.must("fork", slowly, "source", "--name", "late")
	if n := g.Event("oom_kill"); n != 0 {
		t.Errorf("%d processes were killed", n)
	}
}

// memoryFiles counts the files in memory that a process holds: layers that were frozen.
func memoryFiles(t *testing.T, pid int) (n int) {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil || len(links) == 0 {
		t.Fatal(links, err)
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.HasPrefix(target, "/memfd:") {
			n++
		}
	}
	return n
}
