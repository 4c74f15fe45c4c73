package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// networkView is what network show says.
type networkView struct {
	Policy      struct{ Mode string }
	Connections int
	Sessions    int
	Refused     int
	Refusals    []struct {
		Protocol, Address, Name, Reason string
		Port                            int
	}
	Card struct {
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

// TestCaseD6 is a guest with an allowlist in the world: what is allowed works, and of all else nothing gets there. Its clones
// begin with closed connections and work on.
func TestCaseD6(t *testing.T) {
	w := startWorld(t)
	h := newHost(t, "")
	h.must("create", slowly, "--name", "net", "--memory", guestMemory,
		"--allow", "good.example:80", "--allow", "good.example:7", "--allow", "rebound.good.test", "--allow", "198.51.100.7:53/udp", h.image("disk"))
	if got := h.sh("net", "wget -qO- http://good.example/"); got != "hello from the world" {
		t.Fatalf("the allowed server says %q; %+v", got, h.network("net"))
	}
	h.attempts(t, w)
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

// attempts are what a guest may try. The world is the judge.
func (h *host) attempts(t *testing.T, w *world) {
	connect := func(address string, port int) string {
		return fmt.Sprintf("nc %s %d </dev/null 2>&1; true", address, port)
	}
	for _, a := range []struct{ name, script, says string }{
		{"another port", connect("good.example", 22), "refused"},
		{"an address without a name", connect("93.184.216.35", 80), "refused"},
		{"a resolver", connect("8.8.8.8", 53), "refused"},
		{"a resolver with TLS", connect("8.8.8.8", 853), "refused"},
		{"a resolver with HTTPS", connect("8.8.8.8", 443), "refused"},
		{"metadata", connect("169.254.169.254", 80), "refused"},
		{"other metadata", connect("100.100.100.200", 80), "refused"},
		{"a private network", connect("10.1.2.3", 80), "refused"},
		{"the host", connect("93.184.216.1", 22), "refused"},
		{"the gateway", connect("10.0.2.2", 80), "refused"},
		{"metadata of IPv6", connect("fd00:ec2::254", 80), "refused"},
		{"an address of IPv6", connect("2001:4860:4860::8888", 443), "refused"},
		{"metadata, translated", connect("64:ff9b::a9fe:a9fe", 80), "refused"},
		{"an address through its own resolver", "nslookup good.example 8.8.8.8 2>&1; true", ""},
		{"a foreign zone", "nslookup secret.evil.example 2>&1; true", "REFUSED"},
		{"a foreign zone's text", "nslookup -type=txt secret.evil.example 2>&1; true", "REFUSED"},
		{"a rebound name", "wget -qO- http://rebound.good.test/ 2>&1; true", "refused"},
		{"a name that is not asked for", `printf 'GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n' | nc good.example 80 2>&1; true`, ""},
		{"ping", "ping -c 1 -W 1 8.8.8.8 2>&1; true", "100% packet loss"},
		{"UDP", "timeout 2 tftp -g -l /dev/null -r x 93.184.216.34 443 2>&1; true", ""},
	} {
		if out := h.sh("net", a.script); !strings.Contains(out, a.says) || strings.Contains(out, "hello") {
			t.Errorf("%s: the guest reads %q", a.name, out)
		}
	}
	if got := h.sh("net", "nslookup good.example 198.51.100.7"); !strings.Contains(got, worldAddress) {
		t.Errorf("the resolver that is allowed says %q", got)
	}
	reasons := map[string]bool{}
	for _, r := range h.network("net").Refusals {
		reasons[r.Protocol+" "+r.Reason] = true
	}
	for _, want := range []string{"tcp not_allowed", "tcp special_address", "tcp wrong_name", "udp not_allowed", "dns not_allowed", "icmp not_allowed"} {
		if !reasons[want] {
			t.Errorf("no refusal is on record as %q: %v", want, reasons)
		}
	}
	for _, line := range w.saw() {
		switch line {
		case "tcp 93.184.216.34:80", "tcp 93.184.216.34:7", "dns 198.51.100.7 good.example", "dns 93.184.216.34 good.example", "dns 93.184.216.34 rebound.good.test":
		default:
			t.Errorf("reached the world: %s", line)
		}
	}
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
	// Case A3: no two have the same card.
	cards := []string{}
	for _, vm := range []string{"net", "clone", "child"} {
		cards = append(cards, h.sh(vm, "cat /sys/class/net/eth0/address"))
	}
	slices.Sort(cards)
	if len(slices.Compact(cards)) != 3 {
		t.Errorf("cards have the addresses %v", cards)
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
