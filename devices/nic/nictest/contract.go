package nictest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// Network is what is behind a guest's card, whoever enforces its policy.
type Network interface {
	nic.Backend
	// SetPolicy replaces what the guest may reach, for all who enforce it.
	SetPolicy(*policy.Rules)
	Renewed()
	Status() policy.Status
	Close() error
}

// World has a network and what is outside of it.
type World interface {
	// New makes a network for Card, which is closed with the test.
	New(t testing.TB, rules *policy.Rules) Network
	// ListenTCP and ListenUDP open a server, and say where guests find it.
	ListenTCP(t testing.TB, six bool) (net.Listener, netip.AddrPort)
	ListenUDP(t testing.TB, six bool) (net.PacketConn, netip.AddrPort)
}

// Allow is a policy of these entries.
func Allow(t testing.TB, entries ...string) *policy.Rules {
	t.Helper()
	return Compile(t, policy.Policy{Mode: policy.Allowlist, Allow: entries})
}

// Compile makes rules of a policy that is good.
func Compile(t testing.TB, p policy.Policy) *policy.Rules {
	t.Helper()
	r, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// families are those that a world may have.
func families(t *testing.T, test func(t *testing.T, six bool)) {
	t.Run("IPv4", func(t *testing.T) { test(t, false) })
	t.Run("IPv6", func(t *testing.T) { test(t, true) })
}

// Run holds networks to what each of them keeps.
func Run(t *testing.T, w World) {
	for _, tt := range []struct {
		name string
		run  func(*testing.T, World)
	}{
		{"TCP", testTCP}, {"UDP", testUDP}, {"Refused", Refused}, {"NoNetwork", testNoNetwork}, {"SetPolicy", testSetPolicy}, {"Metered", testMetered}, {"Paced", testPaced},
		{"Hostile", testHostile}, {"Clone", testClone}, {"Reset", testReset},
	} {
		t.Run(tt.name, func(t *testing.T) {
			CheckLeaks(t)
			tt.run(t, w)
		})
	}
}

// echoTCP runs a server that says what it hears.
func echoTCP(t testing.TB, w World, six bool) netip.AddrPort {
	t.Helper()
	l, at := w.ListenTCP(t, six)
	var work sync.WaitGroup
	var open []net.Conn // of the first goroutine until that has ended
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open = append(open, c)
			work.Go(func() { io.Copy(c, c); c.Close() })
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-accepted
		for _, c := range open {
			c.Close()
		}
		work.Wait()
	})
	return at
}

func echoUDP(t testing.TB, w World, six bool) netip.AddrPort {
	t.Helper()
	c, at := w.ListenUDP(t, six)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			k, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo(b[:k], from)
		}
	}()
	t.Cleanup(func() { c.Close(); <-done })
	return at
}

// Echo has a guest behind a network of the world's reach a server.
func Echo(t *testing.T, w World) {
	t.Helper()
	server := echoTCP(t, w, false)
	NewGuest(t, w.New(t, Allow(t, server.String()))).open(server)
}

// testTCP carries a megabyte each way.
func testTCP(t *testing.T, w World) {
	families(t, func(t *testing.T, six bool) {
		server := echoTCP(t, w, six)
		g := NewGuest(t, w.New(t, Allow(t, server.String())))
		g.ThereAndBack(server)
	})
}

// testUDP carries datagrams that fit the link, and such as are cut into fragments.
func testUDP(t *testing.T, w World) {
	families(t, func(t *testing.T, six bool) {
		server := echoUDP(t, w, six)
		g := NewGuest(t, w.New(t, Allow(t, server.String())))
		for _, size := range []int{1, 1472, 1473, 8000} {
			c := g.DialUDP(server)
			sent := bytes.Repeat([]byte{byte(size)}, size)
			c.Write(sent)
			b := make([]byte, 1<<14)
			if k, err := c.Read(b); err != nil || !bytes.Equal(b[:k], sent) {
				t.Errorf("%d bytes: %d came back: %v", size, k, err)
			}
			c.Close()
		}
	})
}

// refusal waits until something with this reason is on record.
func (g *Guest) refusal(n Network, reason policy.Reason, protocol string) {
	g.Helper()
	g.Eventually(fmt.Sprintf("refusal of %s: %s", protocol, reason), func() bool {
		for _, r := range n.Status().Refusals {
			if r.Reason == reason && r.Protocol == protocol {
				return true
			}
		}
		return false
	})
}

// refusedTCP has a guest hear at once that it may not connect.
func (g *Guest) refusedTCP(to netip.AddrPort) {
	g.Helper()
	begun := time.Now()
	c, err := g.DialTCP(to)
	if err == nil {
		c.Close()
		g.Errorf("%s: connected", to)
	} else if !strings.Contains(err.Error(), "refused") || time.Since(begun) > Patience/2 {
		g.Errorf("%s: %v after %v", to, err, time.Since(begun))
	}
}

// Refused is case D6 in short: what a network of the world's refuses it refuses at once, and has on record.
func Refused(t *testing.T, w World) {
	t.Helper()
	open, open6 := echoTCP(t, w, false), echoTCP(t, w, true)
	n := w.New(t, Allow(t, open.String(), open6.String()))
	g := NewGuest(t, n)
	for _, text := range []string{
		"93.184.216.34:1", "93.184.216.35:80", "8.8.8.8:53", "8.8.8.8:853", "8.8.8.8:443", "169.254.169.254:80", "100.100.100.200:80", "10.0.2.2:22",
		"10.0.2.2:53", "[fd00:ec2::254]:80", "[2001:4860:4860::8888]:443", "[64:ff9b::a9fe:a9fe]:80", "[fd66:6b76:6d00::2]:53",
		netip.AddrPortFrom(open.Addr(), open.Port()+1).String(), netip.AddrPortFrom(open6.Addr(), open6.Port()+1).String(),
	} {
		to := netip.MustParseAddrPort(text)
		g.refusedTCP(to)
		u := g.DialUDP(to)
		before := g.Unreachable()
		u.Write([]byte("data"))
		g.Eventually("an ICMP error for UDP to "+text, func() bool { return g.Unreachable() > before })
		u.Close()
	}
	g.refusal(n, policy.ReasonNotAllowed, "tcp")
	g.refusal(n, policy.ReasonSpecial, "tcp")
	g.refusal(n, policy.ReasonNotAllowed, "udp")
	for _, to := range []netip.AddrPort{open, open6} {
		if c, err := g.DialTCP(to); err != nil {
			t.Errorf("the allowed one (%v): %v", to, err)
		} else {
			c.Close()
		}
	}
}

func testNoNetwork(t *testing.T, w World) {
	server := echoTCP(t, w, false)
	n := w.New(t, Compile(t, policy.Policy{}))
	g := NewGuest(t, n)
	g.refusedTCP(server)
	g.refusal(n, policy.ReasonNoNetwork, "tcp")
}

// testSetPolicy: a policy that is changed ends what it does not allow any more, and lets new connections through.
func testSetPolicy(t *testing.T, w World) {
	one, two := echoTCP(t, w, false), echoTCP(t, w, false)
	n := w.New(t, Allow(t, one.String()))
	g := NewGuest(t, n)
	c := g.open(one)
	n.SetPolicy(Allow(t, two.String()))
	g.ends(c, true)
	g.open(two)
	g.refusedTCP(one)
}

// testMetered: a guest gets no more than its rate allows, each way, and nothing when it has had all its bytes.
func testMetered(t *testing.T, w World) {
	server := echoTCP(t, w, false)
	with := func(l policy.Limits) *policy.Rules {
		return Compile(t, policy.Policy{Mode: policy.Allowlist, Allow: []string{server.String()}, Limits: l})
	}
	const rate, size = 1 << 20, 512 << 10
	n := w.New(t, with(policy.Limits{Rate: rate}))
	g := NewGuest(t, n)
	c := g.open(server)
	begun := time.Now()
	go c.Write(make([]byte, size))
	if _, err := io.ReadFull(c, make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	const ahead = rate/10 + 64<<10 // a tenth of a second, and a packet
	if took := time.Since(begun); took < time.Second*(size-ahead)/rate {
		t.Errorf("%d bytes took %v", size, took)
	}
	n.SetPolicy(with(policy.Limits{Bytes: size}))
	g.ends(c, true)
	g.refusedTCP(server)
	g.refusal(n, policy.ReasonLimit, "tcp")
	n.SetPolicy(with(policy.Limits{}))
	g.open(server)
}

// testPaced: of datagrams that come too fast a guest sends no more than its pace allows, and gets no more; the others are lost, and are counted.
func testPaced(t *testing.T, w World) {
	const pace, most = 50, 300 // packets a second, and how many have to be lost
	c, server := w.ListenUDP(t, false)
	with := func(packets uint64) *policy.Rules {
		return Compile(t, policy.Policy{Mode: policy.Allowlist, Allow: []string{server.String()}, Limits: policy.Limits{Packets: packets}})
	}
	var there, back atomic.Int64
	var from atomic.Pointer[net.Addr]
	var work sync.WaitGroup
	work.Go(func() {
		for {
			_, a, err := c.ReadFrom(make([]byte, 100))
			if err != nil {
				return
			}
			there.Add(1)
			from.Store(&a)
		}
	})
	t.Cleanup(func() { c.Close(); work.Wait() })
	n := w.New(t, with(pace))
	g := NewGuest(t, n)
	u := g.DialUDP(server)
	work.Go(func() {
		for {
			if _, err := u.Read(make([]byte, 100)); err != nil {
				return
			}
			back.Add(1)
		}
	})
	t.Cleanup(func() { u.Close() })
	flood := func(what string, passed *atomic.Int64, send func()) {
		before, begun := n.Status().Frames["excess"], time.Now()
		g.Eventually(what+": those that are too many are counted", func() bool {
			for range 20 {
				send()
			}
			return n.Status().Frames["excess"]-before >= most && passed.Load() > 0
		})
		// A fifth of a second ahead, and those that begin and end the time.
		allowed := int64((time.Since(begun).Seconds()+0.2)*pace) + 2
		if got := passed.Load(); got > allowed {
			t.Errorf("%s: %d have passed, at most %d may", what, got, allowed)
		}
	}
	flood("from the guest", &there, func() { fmt.Fprint(u, "there") })
	flood("for the guest", &back, func() { c.WriteTo([]byte("back"), *from.Load()) })
	n.SetPolicy(with(0))
	passed := there.Load()
	g.Eventually("what has no pace passes", func() bool {
		fmt.Fprint(u, "there")
		return there.Load() > passed
	})
}

// open makes a connection that has carried something.
func (g *Guest) open(to netip.AddrPort) net.Conn {
	g.Helper()
	c, err := g.DialTCP(to)
	if err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() { c.Close() })
	fmt.Fprint(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		g.Fatal(err)
	}
	return c
}

// ends waits for the reset of a connection, if it may be after something was sent. A network stack says only once that it was reset.
func (g *Guest) ends(c net.Conn, send bool) {
	g.Helper()
	var err error
	if send {
		_, err = fmt.Fprint(c, "y")
	}
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	if err == nil || !strings.Contains(err.Error(), "reset") {
		g.Errorf("a connection that had to end: %v", err)
	}
}

// disturb has the guest answer a segment of the connection that is out of order, as it does once in half a second.
func (g *Guest) disturb(c net.Conn) {
	flow := nic.Flow{Guest: netip.MustParseAddrPort(c.LocalAddr().String()), Remote: netip.MustParseAddrPort(c.RemoteAddr().String())}
	before := g.sent.Load()
	g.deliver(flow.Probe(Card))
	g.Eventually("an answer to what is out of order", func() bool { return g.sent.Load() > before })
}

// Case D7: the connections of a clone's parent end in the clone, by the guest's own kernel, and new ones work. Some
// have answered a segment that was out of order just before.
func testClone(t *testing.T, w World) {
	families(t, func(t *testing.T, six bool) {
		server := echoTCP(t, w, six)
		g := NewGuest(t, w.New(t, Allow(t, server.String())))
		var open []net.Conn
		for range 10 {
			open = append(open, g.open(server))
		}
		clone := w.New(t, Allow(t, server.String()))
		for _, c := range open[:5] {
			g.disturb(c)
		}
		g.Become(clone)
		clone.Renewed()
		begun := time.Now()
		for _, c := range open {
			g.ends(c, false)
		}
		t.Logf("all have ended after %v", time.Since(begun))
		g.open(server)
	})
}

// Suspending is a Network that is told from outside when its guest begins another life.
type Suspending interface {
	Suspend()
	Resume()
}

// testReset: what a guest had open in one life on a network ends in the next one on it.
func testReset(t *testing.T, w World) {
	server := echoTCP(t, w, false)
	n := w.New(t, Allow(t, server.String()))
	g := NewGuest(t, n)
	c := g.open(server)
	s, told := n.(Suspending)
	if told {
		s.Suspend()
	}
	g.Become(n)
	n.Renewed()
	g.ends(c, false)
	if told {
		s.Resume()
	}
	g.open(server)
}

// hostile are frames that lead nowhere, and what they are.
func hostile(to netip.Addr) (list []struct {
	name  string
	frame []byte
	class string // "" if networks have different words for it
}) {
	add := func(name string, frame []byte, class string) {
		list = append(list, struct {
			name  string
			frame []byte
			class string
		}{name, frame, class})
	}
	const tcp, udp, gre, icmp6, fragment = 6, 17, 47, 58, 44
	syn := make([]byte, 20)
	binary.BigEndian.PutUint16(syn[2:], 80)
	syn[12], syn[13] = 0x50, 2
	datagram := []byte{0, 9, 0, 80, 0, 8, 0, 0}
	g4, g6, remote6 := nic.Guest4.String(), nic.Guest6.String(), "2606:2800:220:1::1"
	good := Frame(0x0800, Packet4(g4, to.String(), tcp, syn))
	add("another card's", Change(good, 6, 2, 9, 9, 9, 9, 9), "station")
	add("to another card", Change(good, 0, 2, 9, 9, 9, 9, 9), "station")
	add("in another's name", Frame(0x0800, Packet4("10.0.2.16", to.String(), tcp, syn)), "source")
	add("in the gateway's name", Frame(0x0800, Packet4("10.0.2.2", to.String(), udp, datagram)), "source")
	add("in another's name, IPv6", Frame(0x86dd, Packet6("2001:db8::9", remote6, udp, datagram)), "source")
	add("ARP as the gateway", Frame(0x0806, ARP(2, Card, "10.0.2.2", g4)), "forged")
	add("ARP as another card", Frame(0x0806, ARP(2, nic.MAC{2, 9}, g4, g4)), "forged")
	add("router advertisement", Frame(0x86dd, Packet6("fe80::1", "ff02::1", icmp6, []byte{134, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})), "forged")
	add("redirect", Frame(0x86dd, Packet6("fe80::1", g6, icmp6, redirect())), "forged")
	add("source route", Frame(0x0800, Change(Packet4(g4, to.String(), tcp, append([]byte{131, 3, 4, 0}, syn...)), 0, 0x46)), "options")
	add("routing header", Frame(0x86dd, Packet6(g6, remote6, 43, make([]byte, 24))), "options")
	add("VLAN", Frame(0x8100, append([]byte{0, 1, 8, 0}, good[14:]...)), "ether_type")
	add("local experiment", Frame(0x88b5, make([]byte, 60)), "ether_type")
	add("GRE", Frame(0x0800, Packet4(g4, to.String(), gre, make([]byte, 8))), "refused")
	add("longer than it is", Change(good, 14+2, 0xff, 0xff), "short")
	add("IP cut off", good[:14+19], "short")
	add("later fragment of nothing", Change(Frame(0x0800, Packet4(g4, to.String(), udp, datagram)), 14+6, 0, 3), "")
	add("first fragment without ports", Change(Frame(0x0800, Packet4(g4, to.String(), udp, datagram[:3])), 14+6, 0x20, 0), "")
	add("later fragment of nothing, IPv6", Frame(0x86dd, Packet6(g6, remote6, fragment, append([]byte{udp, 0, 0, 8, 0, 0, 0, 1}, datagram...))), "")
	for n := range 14 + 40 {
		add(fmt.Sprintf("%d bytes", n), good[:min(n, len(good))], "")
	}
	return list
}

// redirect is a message of neighbour discovery that only routers send.
func redirect() []byte { return append([]byte{137, 0, 0, 0, 0, 0, 0, 0}, make([]byte, 32)...) }

// Case D7: tricks below and in IP end at the network, and the guest goes on.
func testHostile(t *testing.T, w World) {
	server := echoTCP(t, w, false)
	n := w.New(t, Allow(t, server.Addr().String(), "2606:2800:220:1::/64"))
	g := NewGuest(t, n)
	c := g.open(server)
	for _, h := range hostile(server.Addr()) {
		before := n.Status().Frames
		g.Send(h.frame)
		if after := n.Status().Frames; h.class != "" && after[h.class] != before[h.class]+1 {
			t.Errorf("%s: frames %v, before %v", h.name, after, before)
		}
	}
	fmt.Fprint(c, "z")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Errorf("a connection beside that: %v", err)
	}
}
