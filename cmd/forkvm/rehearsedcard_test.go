package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/node"
)

const (
	// portOfRehearsal is where restless guests go while their life is rehearsed, portOfLife where they go afterwards.
	portOfRehearsal = 1111
	portOfLife      = 2222
)

// restless is what a guest does all the time: it knocks at a server's port, which depends on who it is, and asks for a name that does.
var restless = fmt.Sprintf(`(while :; do read me </proc/sys/kernel/hostname; nslookup $me.example; sleep 0.1; done) &
while :; do
	read me </proc/sys/kernel/hostname
	port=%d; [ $me = rehearsal ] && port=%d
	nc -w 1 %s $port </dev/null
done`, portOfLife, portOfRehearsal, worldAddress)

// TestRehearsedCard: a VM of a process that has rehearsed a snapshot with a network card reaches what its own policy lets it and nothing else, over
// either backend; and what its guest has tried in the life that was thrown away nobody hears of.
func TestRehearsedCard(t *testing.T) {
	w := startWorld(t)
	route(t)
	h := newHost(t, "")
	h.must("create", slowly, "--name", "net", "--memory", guestMemory, "--network", "no-network", h.image("disk"))
	h.must("exec", "-d", "net", "--", "sh", "-c", "("+restless+") </dev/null >/dev/null 2>&1")
	h.must("network", "set", "net", "allowlist", "--allow", worldAddress+":7")
	h.must("exec", "-d", "net", "--", "sh", "-c", holdingByAddress)
	h.eventually("three connections", func() bool { return h.network("net").Connections == 3 })
	h.must("snapshot", "net", "restless")
	h.must("rm", "-f", "net")
	for _, backend := range []node.Backend{node.BackendUser, node.BackendTap} {
		w.forget()
		h.rehearsedCard(backend)
		for _, line := range w.saw() {
			if strings.Contains(line, fmt.Sprint(portOfRehearsal)) || strings.Contains(line, fmt.Sprint(portOfLife)) {
				t.Errorf("%s: the world saw %q", backend, line)
			}
		}
	}
}

func (h *host) rehearsedCard(backend node.Backend) {
	h.t.Helper()
	others := len(uplinks(h.t))
	by := "--network-backend=" + string(backend)
	flags := []string{"--snapshot", "restless"}
	if backend != node.BackendUser { // what such a snapshot's card has if nobody says
		flags = append(flags, by)
	}
	h.prepare("3", flags...)
	restore := func(name string, more ...string) view {
		h.t.Helper()
		h.must(append([]string{"restore", slowly, "--name", name, by, "restless"}, more...)...)
		return h.inspect(name)
	}
	hello := func(vm string) {
		h.t.Helper()
		if got := h.sh(vm, "wget -qO- http://"+worldAddress+"/"); got != "hello from the world" {
			h.t.Errorf("%s: the allowed server says %q", vm, got)
		}
	}
	used := func(v view) {
		h.t.Helper()
		if h.began(v) {
			h.t.Errorf("%s was not made of a process that has rehearsed", v.Name)
		}
	}
	allow := []string{"--allow", worldAddress + ":80", "--net-limit", "rate=4M,bytes=1G"}
	fast := restore("fast", allow...)
	used(fast)
	hello("fast")
	h.ownCard("fast", fast)
	h.eventually("connections of the snapshot have ended", func() bool { return strings.Count(h.sh("fast", "cat /tmp/held"), "ended") == 3 })
	h.must("reset", "fast")
	hello("fast")
	h.onlyOfItsLife("fast")
	deaf := restore("deaf")
	used(deaf)
	if r := h.forkvm("exec", "deaf", "--", "wget", "-qO-", "http://"+worldAddress+"/"); r.code == 0 {
		h.t.Errorf("deaf reaches something: %v", r)
	}
	h.must("fork", slowly, "--name", "child", "fast")
	used(h.inspect("child"))
	hello("child")
	h.onlyOfItsLife("child")
	if backend == node.BackendUser {
		h.rehearsedPorts(restore)
	}
	h.must("rm", "-f", "fast", "deaf", "child")
	left := h.prepare("2", flags...)
	h.must(append([]string{"prepare", "--count", "1"}, flags...)...)
	for _, r := range left {
		if !slices.ContainsFunc(h.waiting(), func(o node.Record) bool { return o.ID == r.ID }) {
			h.gone(r.PID)
		}
	}
	h.must(append([]string{"prepare", "--count", "0"}, flags...)...)
	h.eventually("networks that waited are gone", func() bool { return len(uplinks(h.t)) == others })
	if groups, err := os.ReadDir(filepath.Join(h.run, "groups")); err != nil || len(groups) != 0 {
		h.t.Errorf("%v are on record of networks, %v", groups, err)
	}
}

// ownCard: the guest's card is the one on record, which a process of its own is kept from misusing.
func (h *host) ownCard(vm string, v view) {
	h.t.Helper()
	r := h.record(v.Directory)
	if got := h.sh(vm, "cat /sys/class/net/eth0/address"); got != r.Identity.MAC {
		h.t.Errorf("%s: the card is %s, not %s", vm, got, r.Identity.MAC)
	}
	if r.Enforcement == nil || r.Enforcement.By != node.EnforceKernel {
		h.t.Errorf("%s: enforced by %+v", vm, r.Enforcement)
	}
}

// onlyOfItsLife: what a restless guest was refused is of its own life, and it was refused something; so say the network and the journal.
func (h *host) onlyOfItsLife(vm string) {
	h.t.Helper()
	own := func(all []refusalView) (seen bool) {
		for _, r := range all {
			if r.Port == portOfRehearsal || strings.HasPrefix(r.Name, "rehearsal") {
				h.t.Errorf("%s: refused: %+v", vm, r)
			}
			seen = seen || r.Port == portOfLife
		}
		return seen
	}
	h.eventually(vm+" is refused something", func() bool { return own(h.network(vm).Refusals) })
	if _, all := h.journalOfRefusals(vm, 0); !own(all) {
		h.t.Errorf("%s: its journal says %+v", vm, all)
	}
}

// rehearsedPorts: what has rehearsed publishes ports of the VM, but none for which it would need privileges.
func (h *host) rehearsedPorts(restore func(string, ...string) view) {
	h.t.Helper()
	h.prepare("1", "--snapshot", "restless")
	if low := restore("low", "-p", "70:70"); !h.began(low) || len(h.waiting()) != 1 {
		h.t.Error("a process without privileges was to publish port 70")
	}
	high := restore("high", "-p", "7070:7070")
	h.must("exec", "-d", "high", "--", "nc", "-l", "-p", "7070", "-e", "echo", "hello from the guest")
	h.eventually("the guest answers at its published port", func() bool {
		c, err := net.Dial("tcp", "127.0.0.1:7070")
		if err != nil {
			h.t.Fatal(err)
		}
		defer c.Close()
		got := make([]byte, 64)
		n, _ := c.Read(got)
		return strings.TrimSpace(string(got[:n])) == "hello from the guest"
	})
	if h.began(high) {
		h.t.Error("high was not made of a process that has rehearsed")
	}
	h.must("rm", "-f", "low", "high")
}
