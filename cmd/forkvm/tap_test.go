package main

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/tapnet"
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
	replaceFile(t, "/proc/sys/net/ipv4/ip_forward", "0")
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
	h.tapPrepared()
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

// tapPrepared: VMs for which processes with a network wait are like others. Of what waits, that whose interface somebody has removed,
// or that is dead, is passed over, and all of it goes.
func (h *host) tapPrepared() {
	h.t.Helper()
	others := len(uplinks(h.t))
	waiting := h.prepare("3", byTAP)
	if n := len(uplinks(h.t)); len(waiting) != 3 || n != others+3 {
		h.t.Fatalf("%d processes wait with %d networks", len(waiting), n-others)
	}
	if out, err := exec.Command("busybox", "ip", "link", "del", h.uplink(waiting[0].ID)).CombinedOutput(); err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	if err := syscall.Kill(waiting[1].PID, syscall.SIGKILL); err != nil {
		h.t.Fatal(err)
	}
	h.gone(waiting[1].PID)
	allow := []string{"--allow", worldAddress + ":80", "--net-limit", "rate=4M,bytes=1G", "connected"}
	h.must(append([]string{"restore", slowly, "--name", "ready", byTAP}, allow...)...)
	if v := h.inspect("ready"); v.ID != waiting[2].ID {
		h.t.Errorf("%s was not made of the process that waited, %s", v.ID, waiting[2].ID)
	}
	h.prepare("1", "--network-backend=usernet")
	h.must(append([]string{"restore", slowly, "--name", "own"}, allow...)...)
	for _, vm := range []string{"ready", "own"} {
		v := h.inspect(vm)
		if h.began(v) {
			h.t.Errorf("%s: its process was started for it", vm)
		}
		if got := h.sh(vm, "wget -qO- http://"+worldAddress+"/"); got != "hello from the world" {
			h.t.Errorf("%s: the allowed server says %q", vm, got)
		}
		h.forkvm("exec", vm, "--", "wget", "-qO-", "http://"+worldAddress+":7/")
		if h.network(vm).Refused == 0 {
			h.t.Errorf("%s: nothing was refused", vm)
		}
		if e := h.record(v.Directory).Enforcement; e == nil || e.By != node.EnforceKernel {
			h.t.Errorf("%s: enforced by %+v", vm, e)
		}
	}
	h.must("rm", "-f", "ready", "own")
	h.prepare("2", byTAP)
	h.eventually("two networks wait that are whole", func() bool { return len(uplinks(h.t)) == others+2 })
	if left := h.prepare("0"); len(left) != 0 {
		h.t.Errorf("%d wait", len(left))
	}
	h.eventually("networks that waited are gone", func() bool { return len(uplinks(h.t)) == others })
	groups, err := os.ReadDir(filepath.Join(h.run, "groups"))
	if err != nil || len(groups) != others {
		h.t.Errorf("%v are on record of %d networks, %v", groups, others, err)
	}
}

// uplink is the host's end of the way out of a VM, or of a process that waits.
func (h *host) uplink(id string) string {
	h.t.Helper()
	data, err := os.ReadFile(filepath.Join(h.run, "groups", id+".tap"))
	var r tapnet.Record
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	var link *net.Interface
	if err == nil {
		link, err = net.InterfaceByIndex(r.Uplink)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return link.Name
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
