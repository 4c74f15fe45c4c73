package main

import (
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/internal/testkit/attempt"
)

// worldEcho is where the world sends back what it gets.
const worldEcho = worldAddress + ":7"

// networked makes a VM with a card that may reach everything public, and guestload in it.
func (h *host) networked(name string, flags ...string) {
	h.t.Helper()
	card := h.freeze("card",
		[]string{"create", slowly, "--name", "card", "--memory", guestMemory, "--network", "no-network", h.image("disk")},
		[]string{"cp", filepath.Join(testkit.RequireGuest(h.t), "guestload"), "card:/guestload"})
	h.must(append([]string{"restore", slowly, "--name", name, "--network", "public", card}, flags...)...)
}

// anewByDHCP is how a guest begins its network anew without the guest agent.
const anewByDHCP = `cat >/run/lease <<'END'
#!/bin/sh
[ "$1" = bound ] && ip addr add "$ip/24" dev "$interface" && ip route add default via "$router"
true
END
chmod +x /run/lease
ip link set eth0 down && ip addr flush dev eth0 && ip link set eth0 up && udhcpc -i eth0 -n -q -f -s /run/lease >&2`

// TestCaseA3Card: no two of a VM's clones have a card of the same address, nor does a clone get its parent's back when it begins
// its network anew. What they have in common means nothing outside of each.
func TestCaseA3Card(t *testing.T) {
	startWorld(t)
	h := newHost(t, "")
	h.networked("clone0")
	h.networked("clone1")
	h.must("fork", slowly, "--name", "child", "clone0")
	h.prepare("2", "--snapshot", "card")
	h.networked("rehearsed0")
	h.networked("rehearsed1")
	vms := []string{"clone0", "clone1", "child", "rehearsed0", "rehearsed1"}
	if h.began(h.inspect("rehearsed0")) || h.began(h.inspect("rehearsed1")) {
		t.Error("processes that have rehearsed were not used")
	}
	const address, local = "cat /sys/class/net/eth0/address", "ip -6 addr show dev eth0 scope link | grep -o 'fe80[^/]*'"
	for what, script := range map[string]string{"addresses of the card": address, "link's own addresses": local} {
		had := map[string]string{}
		for _, vm := range vms {
			is := h.sh(vm, script)
			if other, there := had[is]; there || is == "" {
				t.Errorf("%s: %s and %s have %q", what, vm, other, is)
			}
			had[is] = vm
		}
	}
	for _, vm := range vms {
		before := h.sh(vm, address)
		h.sh(vm, anewByDHCP)
		if after := h.sh(vm, address); after != before {
			t.Errorf("%s: the card is %s and was %s", vm, after, before)
		}
		if got := h.sh(vm, "ping -c 1 10.0.2.2 >/dev/null; wget -qO- http://"+worldAddress+"/"); got != "hello from the world" {
			t.Errorf("%s, its network begun anew: %q", vm, got)
		}
	}
}

// TestCaseD7: whatever frames a guest sends, its sibling hears nothing of them and goes on as before, also while a third one dies of
// a sudden, and each kind is counted.
func TestCaseD7(t *testing.T) {
	startWorld(t)
	h := newHost(t, "")
	for _, vm := range []string{"attacker", "sibling"} {
		h.networked(vm)
	}
	h.networked("third", "-p", "7090:7090")
	neighbours := func() string { return h.sh("sibling", "ping -c 1 10.0.2.2 >/dev/null; cat /proc/net/arp") }
	own, before := h.sh("sibling", "cat /sys/class/net/eth0/address"), neighbours()
	h.must("exec", "-d", "sibling", "--", "sh", "-c", "exec /guestload sniff >/run/sniffed 2>&1")
	ask := "wget -qO- http://" + worldAddress + "/"
	h.eventually("the sibling hears its own", func() bool { return h.sh("sibling", ask+" >/dev/null; cat /run/sniffed") != "" })
	all := slices.DeleteFunc(asFrames(), func(a try) bool { return testing.Short() && !a.brief })
	if err := syscall.Kill(h.inspect("third").PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for i, answer := range h.try("attacker", all) {
		if want, _ := all[i].under(len(attemptPolicies) - 1); answer != want {
			t.Errorf("%s: the guest gets %q, want %q", all[i].name, answer, want)
		}
	}
	if got := h.sh("sibling", ask); got != "hello from the world" {
		t.Errorf("the sibling is told %q", got)
	}
	if after := neighbours(); after != before {
		t.Errorf("the sibling's neighbours are %q and were %q", after, before)
	}
	gateway := regexp.MustCompile(`(?m)^10\.0\.2\.2 .* (([0-9a-f]{2}:){5}[0-9a-f]{2}) `).FindStringSubmatch(before)
	if gateway == nil {
		t.Fatalf("the sibling has no gateway: %q", before)
	}
	for _, line := range strings.Split(h.sh("sibling", "cat /run/sniffed"), "\n") {
		// Either of them speaks, and the gateway to nobody else.
		if !strings.HasPrefix(line, own+" ") && !strings.HasPrefix(line, gateway[1]+" "+own+" ") {
			t.Errorf("the sibling has heard %q", line)
		}
	}
	counts := h.network("attacker").Frames
	classes := []string{"packet", "ether_type", "options", "source"}
	if !testing.Short() {
		classes = append(classes, "echo", "refused", "quiet", "short", "station", "forged", "fragment")
	}
	for _, class := range classes {
		if counts[class] == 0 {
			t.Errorf("no frame is counted as %s: %v", class, counts)
		}
	}
}

// wrongChecksums prints how many of what a guest has received were wrong, by IPv4 and by IPv6.
const wrongChecksums = `awk '/^(Icmp|Tcp|Udp):/ {
	if ($1 == last) { n += $column } else for (i = 2; i <= NF; i++) if ($i == "InCsumErrors") column = i
	last = $1
}
END {print n+0}' /proc/net/snmp
awk '/InCsumErrors/ {n += $2} END {print n+0}' /proc/net/snmp6`

// TestCaseD1: what a guest sends and receives, in segments larger than the link's packets too, is right and as fast in a clone as
// it was before, and no checksum is wrong: with packets of any size, and whatever the guest leaves to its card.
func TestCaseD1(t *testing.T) {
	startWorld(t)
	h := newHost(t, "")
	size := 16 << 20
	if testing.Short() {
		size = 1 << 20
	}
	h.networked("standard")
	h.clonesTransfer("standard", size)
	if testing.Short() {
		return
	}
	for _, c := range []struct {
		name, mtu, script string
		size              int
	}{
		{"narrow", "1280", "true", size},
		{"jumbo", "9000", "true", size},
		{"plain", "1500", "/guestload offloads", size / 8}, // each packet for itself
	} {
		h.must("create", slowly, "--name", c.name, "--memory", guestMemory, "--network", "public", "--mtu", c.mtu, h.image("disk"))
		h.must("cp", filepath.Join(testkit.RequireGuest(t), "guestload"), c.name+":/guestload")
		h.sh(c.name, c.script)
		if got := h.sh(c.name, "cat /sys/class/net/eth0/mtu"); got != c.mtu {
			t.Errorf("%s: the card's packets have at most %s bytes", c.name, got)
		}
		h.clonesTransfer(c.name, c.size)
	}
}

// clonesTransfer has a VM and then its clone send this much and get it back, and datagrams of many sizes.
func (h *host) clonesTransfer(name string, size int) {
	h.t.Helper()
	clone := name + "-clone"
	targets := []string{worldEcho, net.JoinHostPort(worldAddress6, "7")}
	took := map[string]float64{}
	for _, vm := range []string{name, clone} {
		if vm == clone {
			h.must("snapshot", name, name)
			h.must("restore", slowly, "--name", clone, "--network", "public", name)
		}
		for _, to := range targets {
			took[vm] += h.transfers(vm, to, size)
		}
		var all []try
		for _, to := range targets {
			for _, size := range []int{1, 1452, 1472, 1473, 8000, 60000} {
				all = append(all, try{Attempt: attempt.Attempt{Kind: attempt.UDP, To: to, Send: make([]byte, size)}})
			}
		}
		for i, answer := range h.try(vm, all) {
			if answer != attempt.OK {
				h.t.Errorf("%s: a datagram of %d bytes to %s: %s", vm, len(all[i].Send), all[i].To, answer)
			}
		}
		wrong := h.sh(vm, wrongChecksums)
		if strings.Trim(wrong, "0\n") != "" {
			h.t.Errorf("%s: checksums are wrong: %q", vm, wrong)
		}
	}
	if took[clone] > took[name]/0.8 && !testing.Short() {
		h.t.Errorf("the clone took %.0f ms, its parent %.0f", took[clone], took[name])
	}
}

// transfers has a VM send this much to a server and get it back, and returns how many milliseconds that took. In the long form the faster one
// of two counts: a clone's first one pays for pages that it takes from the snapshot, and while the lab waits for its disk the clock goes on.
func (h *host) transfers(vm, to string, size int) float64 {
	h.t.Helper()
	rounds := 2
	if testing.Short() {
		rounds = 1
	}
	took := math.Inf(1)
	for range rounds {
		said := h.sh(vm, fmt.Sprintf("/guestload transfer -to %s -bytes %d", to, size))
		ms, err := strconv.ParseFloat(said, 64)
		if err != nil {
			h.t.Fatalf("%s: transfer says %q", vm, said)
		}
		h.t.Logf("%s: %d bytes to %s and back took %.0f ms", vm, size, to, ms)
		took = min(took, ms)
	}
	return took
}

// TestCaseD3: the guest's resolver says what the world's does, and says so when that says nothing.
func TestCaseD3(t *testing.T) {
	startWorld(t)
	h := newHost(t, "")
	h.networked("d3")
	var all []try
	for _, c := range []struct {
		name   string
		kind   uint16
		answer string
	}{
		{"good.example", recordA, attempt.OK}, {"good.example", recordAAAA, "empty"}, {"many.example", recordA, attempt.OK},
		{"text.example", recordTXT, attempt.OK}, {"none.example", recordA, "NXDOMAIN"}, {"broken.example", recordA, "SERVFAIL"},
		{"silent.example", recordA, "SERVFAIL"},
	} {
		all = append(all, try{want: c.answer, Attempt: attempt.Attempt{Kind: attempt.DNSTCP, To: "10.0.2.3:53", Name: c.name, Type: c.kind}})
		if c.name != "many.example" { // is cut by UDP
			all = append(all, try{want: c.answer, Attempt: attempt.Attempt{Kind: attempt.DNS, Name: c.name, Type: c.kind}})
		}
	}
	for i, answer := range h.try("d3", all) {
		if answer != all[i].want {
			t.Errorf("%s of type %d by %s is %q, want %q", all[i].Name, all[i].Type, all[i].Kind, answer, all[i].want)
		}
	}
	// The system's own resolver asks for both kinds at once, and again by TCP.
	if got := h.sh("d3", "wget -qO- http://many.example/"); got != "hello from the world" {
		t.Errorf("a name with many addresses: %q", got)
	}
}

// TestCaseD4: queries from thousands of ports and datagrams to nobody leave nothing open, nor do connections to nobody; nothing
// grows beyond its bound.
func TestCaseD4(t *testing.T) {
	testkit.Long(t)
	startWorld(t)
	h := newHost(t, "")
	h.networked("d4")
	open := func() int {
		entries, err := os.ReadDir(filepath.Join("/proc", fmt.Sprint(h.inspect("d4").PID), "fd"))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := open()
	var most atomic.Int64
	stop, watched := make(chan struct{}), make(chan struct{})
	fds := filepath.Join("/proc", fmt.Sprint(h.inspect("d4").PID), "fd")
	go func() {
		defer close(watched)
		for {
			entries, _ := os.ReadDir(fds)
			most.Store(max(most.Load(), int64(len(entries))))
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	const count = 4000
	answered, err := strconv.Atoi(h.sh("d4", fmt.Sprintf("/guestload queries -name good.example -count %d", count)))
	if err != nil || answered < count*99/100 {
		t.Errorf("%d of %d queries were answered: %v", answered, count, err)
	}
	h.sh("d4", fmt.Sprintf("/guestload scatter -to 20.1.1.1:5001 -count %d", count/4))
	h.sh("d4", fmt.Sprintf("/guestload scatter -to 20.1.%%d.%%d:5001 -count %d", count/4))
	h.sh("d4", fmt.Sprintf("/guestload scatter -network tcp -to 10.1.%%d.%%d:80 -count %d", count/4))
	close(stop)
	<-watched
	t.Logf("%d descriptors before, %d at most", before, most.Load())
	if most.Load() > 512 {
		t.Errorf("%d descriptors were open", most.Load())
	}
	deadline := time.Now().Add(time.Minute)
	for open() > before+5 && time.Now().Before(deadline) {
		time.Sleep(time.Second)
	}
	if n := open(); n > before+5 {
		t.Errorf("%d descriptors are open, %d before", n, before)
	}
	// A flood takes a line or two of the journal, whatever it was.
	if lines, refused := h.journalOfRefusals("d4", 0); lines > 8 || len(refused) > 8*256 {
		t.Errorf("%d refusals in %d lines are on record", len(refused), lines)
	}
}

// TestCaseD9: what comes after a VM that was killed has its port, or its way out, at once, and its traffic: nothing of the dead one is
// in the way, and nothing is left.
func TestCaseD9(t *testing.T) {
	testkit.Long(t)
	startWorld(t)
	route(t)
	h := newHost(t, "")
	h.networked("d9")
	h.must("snapshot", "d9", "d9")
	h.must("rm", "-f", "d9")
	const rounds = 10
	life := func(name string, flags ...string) (pid int) {
		t.Helper()
		h.must(append([]string{"restore", slowly, "--name", name, "--network", "public", "d9"}, flags...)...)
		if out := h.sh(name, "/guestload transfer -to "+worldEcho+" -bytes 1048576"); out == "" {
			t.Errorf("%s transfers nothing", name)
		}
		pid = h.inspect(name).PID
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	for i := range rounds {
		pid := life(fmt.Sprint("life", i), "-p", "7090:7090")
		eventually(t, "the killed process has gone", func() bool { return syscall.Kill(pid, 0) != nil || !listens("127.0.0.1:7090") })
	}
	for i := range rounds {
		life(fmt.Sprint("tap", i), byTAP) // beside the one that is on its way out
		for _, route := range routesTwice(t) {
			t.Errorf("round %d: more than one route to %s", i, route)
		}
	}
	eventually(t, "nothing is left of networks", func() bool { return len(uplinks(t)) == 0 })
}

// listens says whether somebody listens at an address.
func listens(at string) bool {
	c, err := net.Dial("tcp", at)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// TestHundredConnections: a hundred connections each way end within a second of a reset, and in a child of a fork, at both ends;
// those of the parent go on, and new ones work at once.
func TestHundredConnections(t *testing.T) {
	testkit.Long(t)
	startWorld(t)
	h := newHost(t, "")
	const count = 100
	h.networked("many", "-p", "7000:7000")
	h.must("exec", "-d", "many", "--", "sh", "-c", "exec /guestload hold -to "+worldEcho+" -count "+fmt.Sprint(count)+" >/run/hold.log 2>&1")
	says := func(word string) func() bool {
		return func() bool { return strings.Contains(h.sh("many", "cat /run/hold.log"), word) }
	}
	h.eventually("connections out", says("connected"))
	var conns []net.Conn
	for range count {
		c, err := net.Dial("tcp", "127.0.0.1:7000")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	h.eventually("connections in", says("accepted"))
	if n := h.network("many").Connections; n != 2*count {
		t.Errorf("%d connections are open", n)
	}
	h.must("snapshot", "many", "connected")
	all := func(vm string) {
		t.Helper()
		begun := time.Now()
		h.eventually(vm+": all connections end", func() bool { return h.sh(vm, "wc -l </run/held") == fmt.Sprint(2*count) })
		t.Logf("%s: all connections had ended after %v", vm, time.Since(begun).Round(time.Millisecond))
		if took := time.Since(begun); took > 2*time.Second {
			t.Errorf("%s: it took %v until all connections had ended", vm, took)
		}
		if out := h.sh(vm, "/guestload transfer -to "+worldEcho+" -bytes 65536"); out == "" {
			t.Errorf("%s: a new connection transfers nothing", vm)
		}
	}
	h.must("fork", slowly, "--name", "child", "many")
	all("child")
	if got := h.sh("many", "wc -l </run/held"); got != "0" {
		t.Errorf("%s of the parent's connections have ended", got)
	}
	h.must("reset", "--to", "connected", "many")
	all("many")
	var closed sync.WaitGroup
	for _, c := range conns {
		closed.Go(func() {
			c.SetReadDeadline(time.Now().Add(promptly))
			if _, err := io.ReadAll(c); err != nil && os.IsTimeout(err) {
				t.Errorf("the host's end is open: %v", err)
			}
		})
	}
	closed.Wait()
	if n := h.network("many").Connections; n != 0 {
		t.Errorf("%d connections are open after a reset", n)
	}
}
