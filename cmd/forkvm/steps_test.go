package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// boot makes a VM from an image and takes a snapshot of it, called base.
func (h *host) boot(name string) {
	h.t.Helper()
	h.must("create", slowly, "--name", name, "--memory", guestMemory, h.image("disk"))
	h.must("snapshot", name, "base")
}

// rollout is a VM that records its steps, in the guest's memory and on its disk,
// and as snapshots.
type rollout struct {
	h    *host
	vm   string
	done []string // what the guest has noted so far
}

// step does something in the guest and takes a snapshot of it.
func (r *rollout) step(name string) {
	r.h.t.Helper()
	r.h.sh(r.vm, fmt.Sprintf("echo %[1]s >> /root/steps; sync; echo %[1]s >> /run/steps", name))
	r.done = append(r.done, name)
	var taken struct {
		Name     string
		OwnBytes int64   `json:"own_bytes"`
		PauseMS  float64 `json:"pause_ms"`
	}
	if err := json.Unmarshal([]byte(r.h.must("snapshot", r.vm, name, "-o", "json")), &taken); err != nil || taken.Name != name {
		r.h.t.Fatalf("snapshot %s: %v, %+v", name, err, taken)
	}
	r.h.t.Logf("%s: %d KiB of its own, pause %.1f ms", name, taken.OwnBytes>>10, taken.PauseMS)
	if taken.OwnBytes > 24<<20 {
		r.h.t.Errorf("%s stored %d bytes for a step", name, taken.OwnBytes)
	}
}

// branch goes on from a step in a VM of its own.
func (r *rollout) branch(step string) *rollout {
	r.h.t.Helper()
	vm := "from-" + step
	r.h.must("create", slowly, "--snapshot", step, "--name", vm)
	at := slices.Index(r.done, step)
	return &rollout{h: r.h, vm: vm, done: slices.Clone(r.done[:at+1])}
}

// treeNode is one snapshot as forkvm tree prints it.
type treeNode struct {
	Name, Parent string
	Depth        int
	VMs          []struct{ Name string }
}

func (h *host) tree(args ...string) map[string]treeNode {
	h.t.Helper()
	var v struct{ Nodes []treeNode }
	if err := json.Unmarshal([]byte(h.must(append([]string{"tree", "-o", "json"}, args...)...)), &v); err != nil {
		h.t.Fatal(err)
	}
	nodes := map[string]treeNode{}
	for _, n := range v.Nodes {
		nodes[n.Name] = n
	}
	return nodes
}

// grow makes a tree of steps: a trunk, a branch from its middle, a branch from
// the middle of that one, and so on, each of so many steps. It returns what each
// step has to show.
func grow(h *host, lengths ...int) map[string][]string {
	shows := map[string][]string{}
	r := &rollout{h: h, vm: "trunk"}
	for depth, length := range lengths {
		var own []string
		for i := range length {
			name := fmt.Sprintf("%c%d", 'a'+depth, i)
			r.step(name)
			shows[name] = slices.Clone(r.done)
			own = append(own, name)
		}
		if depth+1 < len(lengths) {
			r = r.branch(own[len(own)/2])
		}
	}
	return shows
}

// everyNodeShowsItsOwn boots each node of a tree and looks at what its guest has.
func everyNodeShowsItsOwn(h *host, shows map[string][]string) {
	h.t.Helper()
	for name, steps := range shows {
		vm := "look-" + name
		h.must("create", slowly, "--snapshot", name, "--name", vm)
		want := strings.Join(append(slices.Clone(steps), steps...), "\n")
		if got := h.sh(vm, "echo 3 > /proc/sys/vm/drop_caches; cat /root/steps /run/steps"); got != want {
			h.t.Errorf("%s shows %q, want %q", name, got, want)
		}
		h.must("rm", "-f", vm)
	}
}

// A rollout takes a snapshot after each step, goes on from an earlier one, and
// from one of those: each costs what changed, is at its place in the tree, and can
// be booted.
func TestTreeOfSteps(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("trunk")
	shows := grow(h, 4, 2, 2)
	nodes := h.tree("base")
	if len(nodes) != 9 {
		t.Errorf("%d nodes: %v", len(nodes), nodes)
	}
	for name, parent := range map[string]string{"a0": "base", "a3": "a2", "b0": "a2", "b1": "b0", "c0": "b1", "c1": "c0"} {
		if nodes[name].Parent != parent {
			t.Errorf("%s grew from %s, want %s", name, nodes[name].Parent, parent)
		}
	}
	if vms := nodes["a3"].VMs; len(vms) != 1 || vms[0].Name != "trunk" {
		t.Errorf("at a3: %v", vms)
	}
	everyNodeShowsItsOwn(h, shows)

	// The middle of the chain goes; nothing else does.
	h.must("snapshot", "rm", "a2")
	nodes = h.tree()
	if nodes["a3"].Parent != "a1" || nodes["b0"].Parent != "a1" {
		t.Errorf("after a2 went: %v", nodes)
	}
	delete(shows, "a2")
	everyNodeShowsItsOwn(h, map[string][]string{"a3": shows["a3"], "c1": shows["c1"]})
	h.must("snapshot", "check")

	var d struct {
		Memory struct{ Changed int }
		Disks  []struct{ Changed int }
	}
	if err := json.Unmarshal([]byte(h.must("diff", "--blocks", "a0", "a1", "-o", "json")), &d); err != nil || d.Memory.Changed == 0 || len(d.Disks) != 1 || d.Disks[0].Changed == 0 {
		t.Errorf("diff: %v, %+v", err, d)
	}
	// Without a name, steps are numbered.
	if got := strings.TrimSpace(h.must("snapshot", "trunk")) + strings.TrimSpace(h.must("snapshot", "trunk")); got != "trunk-1trunk-2" {
		t.Errorf("made-up names: %s", got)
	}
	for range layer.MergeWidth {
		h.sh("trunk", "echo more >> /root/more; sync")
		h.must("snapshot", "trunk")
	}
	if n := h.unnamedFiles("trunk"); n > layer.MergeWidth/2 {
		t.Errorf("the disk of the trunk is in %d files", n)
	}
}

// unnamedFiles counts the files without a name that a VM process has, which are what was
// written to its disks.
func (h *host) unnamedFiles(vm string) (n int) {
	h.t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", h.inspect(vm).PID))
	if err != nil || len(links) == 0 {
		h.t.Fatalf("files of %s: %v, %v", vm, links, err)
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.HasPrefix(target, h.data+"/tmp/#") {
			n++
		}
	}
	return n
}

// TestTreeOf100Steps is the same for a hundred steps, three forks deep.
func TestTreeOf100Steps(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, t.TempDir())
	h.boot("trunk")
	shows := grow(h, 40, 30, 20, 10)
	if len(shows) != 100 {
		t.Fatalf("%d steps", len(shows))
	}
	everyNodeShowsItsOwn(h, shows)
	h.must("snapshot", "check")
}
