package main

import (
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/forkvm/forkvm/internal/node"
)

// route lets this machine pass packets on, as one has to for cards with TAP devices.
func route(t *testing.T) {
	t.Helper()
	replaceFile(t, "/proc/sys/net/ipv4/ip_forward", "1")
	replaceFile(t, "/proc/sys/net/ipv6/conf/all/forwarding", "1")
}

// uplinks are the host's ends of the ways out of VMs.
func uplinks(t *testing.T) (names []string) {
	t.Helper()
	list, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		if strings.HasPrefix(i.Name, "fkvm-") {
			names = append(names, i.Name)
		}
	}
	slices.Sort(names)
	return names
}

// routesTwice are destinations for which this machine has more than one route.
func routesTwice(t *testing.T) (list []string) {
	t.Helper()
	table, err := os.ReadFile("/proc/net/route")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 7 {
			to := f[1] + "/" + f[7] // destination and mask
			if seen[to]++; seen[to] == 2 {
				list = append(list, to)
			}
		}
	}
	return list
}

const byTAP = "--network-backend=tap"

// holdingByAddress is holding without a name.
const holdingByAddress = `for i in 1 2 3; do sleep 100000 | (nc ` + worldAddress + ` 7; echo ended >>/tmp/held) & done; wait`

// TestTap is a guest whose card has a TAP device: what its policy allows works, and of all else nothing gets out; connections end
// in clones and after a reset; and nothing of it is left when its process is killed.
func TestTap(t *testing.T) {
	w := startWorld(t)
	h := newHost(t, "")
	create := func(name string, more ...string) result {
		return h.forkvm(append([]string{"create", slowly, "--name", name, "--memory", guestMemory, byTAP}, append(more, h.image("disk"))...)...)
	}
	if r := create("none", "--allow", worldAddress); r.code == 0 || !strings.Contains(r.stderr, "sysctl -w net.ipv4.ip_forward=1") {
		t.Errorf("on a host that passes nothing on: %v", r)
	}
	route(t)
	for _, refused := range [][]string{{"--allow", "good.example:80"}, {"--allow", worldAddress, "-p", "7070:70"}, {"--allow", hostAddress}, {"--allow", worldAddress, "--net-limit", "connections=4"}} {
		entry := refused[1]
		if len(refused) > 2 {
			entry = "--network-backend usernet"
		}
		if r := create("none", refused...); r.code == 0 || !strings.Contains(r.stderr, entry) {
			t.Errorf("%q: %v", refused, r)
		}
	}
	if left := uplinks(t); len(left) != 0 {
		t.Errorf("VMs that were not made have left %v", left)
	}
	if r := create("net", "--allow", worldAddress+":80"); r.code != 0 {
		t.Fatal(r)
	}
	if got := h.sh("net", "wget -qO- http://"+worldAddress+"/"); got != "hello from the world" {
		t.Fatalf("the allowed server says %q; %+v", got, h.network("net"))
	}
	h.tryAll(w, "net", node.BackendTap)
	h.tapClones(t)
	if r := h.forkvm("network", "set", "net", "allowlist", "--allow", "good.example:80"); r.code == 0 || !strings.Contains(r.stderr, `"good.example:80"`) {
		t.Errorf("a policy with a name: %v", r)
	}
	h.must("network", "set", "net", "no-network")
	if r := h.forkvm("exec", "net", "--", "wget", "-qO-", "http://"+worldAddress+"/"); r.code == 0 {
		t.Errorf("without a network: %v", r)
	}
	h.tapKilled()
	eventually(t, "nothing is left of networks", func() bool { return len(uplinks(t)) == 0 })
}

// tapClones: connections end in a clone, after a reset and in a child, and new ones work at once; the parent's go on.
func (h *host) tapClones(t *testing.T) {
	ended := func(vm string) int { return strings.Count(h.sh(vm, "cat /tmp/held 2>/dev/null || true"), "ended") }
	hello := func(vm string) {
		t.Helper()
		if got := h.sh(vm, "wget -qO- http://"+worldAddress+"/"); got != "hello from the world" {
			t.Errorf("%s: a new connection says %q", vm, got)
		}
	}
	allow := []string{"--allow", worldAddress + ":80", "--allow", worldAddress + ":7"}
	h.must(append([]string{"network", "set", "net", "allowlist"}, allow...)...)
	h.must("exec", "-d", "net", "--", "sh", "-c", holdingByAddress)
	eventually(t, "three connections", func() bool { return h.network("net").Connections == 3 })
	h.must("snapshot", "net", "connected")
	h.must(append([]string{"restore", slowly, "--name", "clone", byTAP, "connected"}, allow...)...)
	for _, life := range []string{"clone", "reset"} {
		eventually(t, life+": connections end", func() bool { return ended("clone") == 3 })
		hello("clone")
		h.must("reset", "clone")
	}
	h.must("fork", slowly, "--name", "child", "net")
	eventually(t, "child: connections end", func() bool { return ended("child") == 3 })
	hello("child")
	if n := ended("net"); n != 0 || h.network("net").Connections != 3 {
		t.Errorf("%d of the parent's connections have ended", n)
	}
	if n := len(uplinks(t)); n != 3 {
		t.Errorf("%d ways out of 3 VMs", n)
	}
}

// tapKilled is case D9 in short: what comes after VMs that were killed, with connections open, has its traffic at once.
func (h *host) tapKilled() {
	h.t.Helper()
	kill := func(vm string) {
		if err := syscall.Kill(h.inspect(vm).PID, syscall.SIGKILL); err != nil {
			h.t.Error(err)
		}
	}
	for _, vm := range []string{"net", "clone", "child"} {
		kill(vm)
	}
	h.must("restore", slowly, "--name", "next", byTAP, "--allow", worldAddress, "connected")
	if got := h.sh("next", "wget -qO- http://"+worldAddress+"/"); got != "hello from the world" {
		h.t.Errorf("after others were killed: a new connection says %q", got)
	}
	kill("next")
}
