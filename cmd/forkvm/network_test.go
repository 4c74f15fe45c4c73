package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/node"
)

// networkView is what network show says.
type networkView struct {
	Policy      struct{ Mode string }
	Connections int
	Sessions    int
	Refused     int
	Refusals    []refusalView
	Frames      map[string]int
	Card        struct {
		Sent     int
		Received int
	}
}

func (h *host) network(vm string) (v networkView) {
	h.t.Helper()
	if err := json.Unmarshal([]byte(h.must("network", "show", "-o", "json", vm)), &v); err != nil {
		h.t.Fatal(err)
	}
	return v
}

// holding is what a guest does to have an open connection: it writes a line when that has ended.
const holding = `for i in 1 2 3; do sleep 100000 | (nc good.example 7; echo ended >>/tmp/held) & done; wait`

// TestCaseD6 is a guest in the world: what is allowed works, and of all else nothing gets there. Its clones begin with closed
// connections and work on.
func TestCaseD6(t *testing.T) {
	w := startWorld(t)
	h := newHost(t, "")
	h.must("create", slowly, "--name", "net", "--memory", guestMemory,
		"--allow", "good.example:80", "-p", "7070:7070", h.image("disk"))
	if got := h.sh("net", "wget -qO- http://good.example/"); got != "hello from the world" {
		t.Fatalf("the allowed server says %q; %+v", got, h.network("net"))
	}
	if !testing.Short() {
		h.publishedPort()
	}
	h.tryAll(w, "net", node.BackendUser)
	h.must("network", "set", "net", "allowlist", "--allow", "good.example:80", "--allow", "good.example:7")
	h.clonesOfConnections(t)
	h.manyQueries(t)
	h.must("network", "set", "net", "no-network")
	if r := h.forkvm("exec", "net", "--", "wget", "-qO-", "http://"+worldAddress+"/"); r.code == 0 {
		t.Errorf("without a network: %v", r)
	}
	if r := h.forkvm("network", "set", "net", "allowlist", "--allow", "10.0.0.1/8"); r.code != 2 || !strings.Contains(r.stderr, `"10.0.0.1/8"`) {
		t.Errorf("an entry that is none: %v", r)
	}
	if v := h.network("net"); v.Policy.Mode != "no-network" {
		t.Errorf("policy is %+v", v)
	}
}

// publishedPort: whoever comes to the host's port is at the guest's.
func (h *host) publishedPort() {
	h.t.Helper()
	h.must("exec", "-d", "net", "--", "nc", "-l", "-p", "7070", "-e", "echo", "hello from the guest")
	eventually(h.t, "the guest answers at its published port", func() bool {
		c, err := net.Dial("tcp", "127.0.0.1:7070")
		if err != nil {
			h.t.Fatal(err)
		}
		defer c.Close()
		got, _ := io.ReadAll(c)
		return strings.TrimSpace(string(got)) == "hello from the guest"
	})
}

// clonesOfConnections: the connections of a clone's parent end in the clone, and after a reset, by a reset from the far end;
// those of the parent go on.
func (h *host) clonesOfConnections(t *testing.T) {
	ended := func(vm string) int { return strings.Count(h.sh(vm, "cat /tmp/held 2>/dev/null || true"), "ended") }
	h.must("exec", "-d", "net", "--", "sh", "-c", holding)
	eventually(t, "three connections", func() bool { return h.network("net").Connections == 3 })
	h.must("snapshot", "net", "connected")
	allow := []string{"--allow", "good.example:80", "--allow", "good.example:7"}
	h.must(append([]string{"restore", slowly, "--name", "clone", "connected"}, allow...)...)
	for _, life := range []string{"clone", "reset"} {
		eventually(t, life+": connections end", func() bool { return ended("clone") == 3 })
		if got := h.sh("clone", "wget -qO- http://good.example/"); got != "hello from the world" {
			t.Errorf("%s: a new connection says %q", life, got)
		}
		h.must("reset", "clone")
	}
	h.must("fork", slowly, "--name", "child", "net")
	eventually(t, "child: connections end", func() bool { return ended("child") == 3 })
	if got := h.sh("child", "wget -qO- http://good.example/"); got != "hello from the world" {
		t.Errorf("child: a new connection says %q", got)
	}
	if n := ended("net"); n != 0 || h.network("net").Connections != 3 {
		t.Errorf("%d of the parent's connections have ended", n)
	}
}

// manyQueries is case D4, in short: queries from many ports leave nothing open.
func (h *host) manyQueries(t *testing.T) {
	open := func() int {
		entries, err := os.ReadDir(filepath.Join("/proc", fmt.Sprint(h.inspect("net").PID), "fd"))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := open()
	h.sh("net", "for i in $(seq 100); do nslookup good.example >/dev/null || echo lost; done")
	if got := h.sh("net", "for i in $(seq 20); do nslookup good.example >/dev/null || echo lost; done"); got != "" {
		t.Errorf("queries are lost: %q", got)
	}
	eventually(t, "descriptors as before", func() bool { return open() <= before+5 })
}
