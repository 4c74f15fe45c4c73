package usernet

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

func echoBack(c net.Conn) { io.Copy(c, c) }

func allow(entries ...string) policy.Policy {
	return policy.Policy{Mode: policy.Allowlist, Allow: entries}
}

func limited(l policy.Limits, entries ...string) policy.Policy {
	p := allow(entries...)
	p.Limits = l
	return p
}

// refusal waits until something with this reason is on record.
func (g *guest) refusal(reason policy.Reason, protocol string) {
	g.Helper()
	g.eventually(fmt.Sprintf("refusal of %s: %s", protocol, reason), func() bool {
		_, list := g.net.Refusals()
		for _, r := range list {
			if r.Reason == reason && r.Protocol == protocol {
				return true
			}
		}
		return false
	})
}

func TestTCP(t *testing.T) {
	server := serveTCP(t, echoBack)
	g := newGuest(t, Config{Policy: nictest.Compile(t, allow(server.String()))})
	g.ThereAndBack(server)
	g.eventually("the connection is gone", func() bool {
		count := 0
		g.net.relays.each(func(*relay) { count++ })
		return count == 0
	})
}

func TestNoNetwork(t *testing.T) {
	server := serveTCP(t, echoBack)
	g := newGuest(t, Config{Policy: nictest.Compile(t, policy.Policy{})})
	if _, err := g.dialTCP(server); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("error %v", err)
	}
	g.refusal(policy.ReasonNoNetwork, "tcp")
}

// A policy that is changed ends what it does not allow any more, and lets new connections through.
func TestSetPolicy(t *testing.T) {
	one, two := serveTCP(t, echoBack), serveTCP(t, echoBack)
	g := newGuest(t, Config{Policy: nictest.Compile(t, allow(one.String()))})
	c, err := g.dialTCP(one)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "x")
	io.ReadFull(c, make([]byte, 1))
	g.net.SetPolicy(nictest.Compile(t, allow(two.String())))
	if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("a connection that is not allowed any more: %v", err)
	}
	if c, err := g.dialTCP(two); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
	if _, err := g.dialTCP(one); err == nil {
		t.Error("a connection that is not allowed any more can be made")
	}
}

func TestServerRefuses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(elsewhere, l.Addr().(*net.TCPAddr).AddrPort().Port())
	l.Close()
	g := newGuest(t, Config{Policy: nictest.Compile(t, allow(at.String()))})
	if _, err := g.dialTCP(at); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("error %v", err)
	}
}

func TestConnectionLimit(t *testing.T) {
	server := serveTCP(t, echoBack)
	g := newGuest(t, Config{Policy: nictest.Compile(t, limited(policy.Limits{Connections: 2}, server.String()))})
	var open []net.Conn
	for range 2 {
		c, err := g.dialTCP(server)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	if _, err := g.dialTCP(server); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("one more: %v", err)
	}
	for _, c := range open {
		c.Close()
	}
	g.eventually("there is room again", func() bool {
		c, err := g.dialTCP(server)
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
}

func TestUDP(t *testing.T) {
	server := serveUDP(t, func(b []byte) []byte { return append([]byte("re:"), b...) })
	g := newGuest(t, Config{Policy: nictest.Compile(t, allow(server.String()))})
	for _, size := range []int{1, 1472, 1473, 8000} {
		c := g.dialUDP(server)
		c.Write(bytes.Repeat([]byte{'x'}, size))
		b := make([]byte, 1<<14)
		if k, err := c.Read(b); err != nil || k != size+3 {
			t.Errorf("%d bytes: %d came back: %v", size, k, err)
		}
		c.Close()
	}
}

// Case D4: sessions are bounded, and the one that was idle longest ends first.
func TestCaseD4Sessions(t *testing.T) {
	server := serveUDP(t, func(b []byte) []byte { return b })
	g := newGuest(t, Config{Policy: nictest.Compile(t, limited(policy.Limits{Sessions: 8}, server.String()))})
	for i := range 200 {
		c := g.dialUDP(server)
		fmt.Fprint(c, i)
		b := make([]byte, 10)
		if k, err := c.Read(b); err != nil || string(b[:k]) != fmt.Sprint(i) {
			t.Fatalf("datagram %d: %q, %v", i, b[:k], err)
		}
		c.Close()
		if n := g.net.udp.count(); n > 8 {
			t.Fatalf("%d sessions", n)
		}
	}
}

// Case D4: a session that is idle ends. Whether its answer comes in time is not asked here.
func TestCaseD4IdleSessions(t *testing.T) {
	arrived := make(chan struct{}, 5)
	server := serveUDP(t, func(b []byte) []byte {
		arrived <- struct{}{}
		return b
	})
	g := newGuest(t, Config{Policy: nictest.Compile(t, allow(server.String())), SessionIdle: 300 * time.Millisecond})
	for range cap(arrived) {
		c := g.dialUDP(server)
		fmt.Fprint(c, "x")
		<-arrived
		c.Close()
	}
	g.eventually("idle sessions end", func() bool { return g.net.udp.count() == 0 })
}

func TestRestoreRefuses(t *testing.T) {
	n, err := New(Config{Guest: guestMAC, Policy: nictest.Compile(t, policy.Policy{})})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	for _, bad := range []string{
		`x`, `1`, `{"version":2}`, `{"version":1,"flows":[{"guest":"1.2.3.4:1","remote":"1.2.3.4:1"}]}`,
		`{"version":1,"flows":[{"guest":"10.0.2.15:1","remote":"[::1]:1"}]}`, `{"version":1,"flows":[{}]}`,
	} {
		if err := n.Restore([]byte(bad)); err == nil {
			t.Errorf("%s: accepted", bad)
		}
	}
	for _, good := range []string{``, `{"version":1}`} {
		if err := n.Restore([]byte(good)); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// byName has a guest whose policy allows names, a resolver that answers with public addresses, and servers behind these.
func byName(t *testing.T, server netip.AddrPort, entries ...string) *guest {
	g := newGuest(t, Config{Policy: nictest.Compile(t, allow(entries...)), Resolvers: []netip.AddrPort{local(serveUDP(t, zone))}})
	g.net.connect = func(ctx context.Context, network, at string) (net.Conn, error) {
		if a := netip.MustParseAddrPort(at); a.Addr() == elsewhere {
			at = server.String()
		}
		return toLoopback(ctx, network, at)
	}
	return g
}

// Case D6: names count by the addresses that they were answered with, and by what the client asks the server for.
func TestCaseD6ByName(t *testing.T) {
	server := serveTCP(t, echoBack)
	g := byName(t, server, "good.example:443", "good.example:80", "rebound.example")
	to := netip.MustParseAddrPort("93.184.216.34:443")
	if _, err := g.dialTCP(to); err == nil {
		t.Error("connected to an address that no name was answered with")
	}
	if a := g.lookup("good.example"); a != to.Addr() {
		t.Fatalf("good.example is %v", a)
	}
	if a := g.lookup("rebound.example"); a != netip.MustParseAddr("169.254.169.254") {
		t.Fatalf("rebound.example is %v", a)
	}
	if _, err := g.dialTCP(netip.MustParseAddrPort("169.254.169.254:80")); err == nil {
		t.Error("connected to where a name was bound to")
	}
	for _, tt := range []struct {
		name string
		port uint16
		say  []byte
		ok   bool
	}{
		{"TLS", 443, clientHello(t, "good.example"), true},
		{"TLS with another name", 443, clientHello(t, "evil.example"), false},
		{"TLS without a name", 443, clientHello(t, ""), false},
		{"HTTP", 80, []byte("GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"), true},
		{"HTTP with a port", 80, []byte("GET / HTTP/1.1\r\nhost:good.example:80\r\n\r\n"), true},
		{"HTTP with an address in its path", 80, []byte("GET /fetch?http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n"), true},
		{"HTTP with another name in its target", 80, []byte("GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n"), false},
		{"HTTP with another name", 80, []byte("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), false},
		{"HTTP with two names", 80, []byte("GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n"), false},
		{"HTTP with another target", 80, []byte("GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n"), false},
		{"a tunnel", 80, []byte("CONNECT evil.example:443 HTTP/1.1\r\nHost: good.example\r\n\r\n"), false},
		{"another protocol", 80, []byte("\x00\x01hello"), true},
		{"SSH", 80, []byte("SSH-2.0-x\r\n"), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := g.dialTCP(netip.AddrPortFrom(to.Addr(), tt.port))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			// Byte by byte in the beginning: what a client says comes in pieces of any size.
			c.Write(tt.say[:1])
			c.Write(tt.say[1:])
			got := make([]byte, len(tt.say))
			_, err = io.ReadFull(c, got)
			if tt.ok && (err != nil || !bytes.Equal(got, tt.say)) {
				t.Errorf("got %q, %v", got, err)
			}
			if !tt.ok && err == nil {
				t.Errorf("it went through: %q", got)
			}
		})
	}
	g.refusal(policy.ReasonWrongName, "tcp")
	if _, err := g.dialTCP(netip.AddrPortFrom(to.Addr(), 22)); err == nil {
		t.Error("connected to another port")
	}
}

// clientHello returns what a TLS client sends first.
func clientHello(t testing.TB, name string) []byte {
	near, far := net.Pipe()
	defer far.Close()
	config := &tls.Config{ServerName: name, InsecureSkipVerify: true}
	go func() {
		tls.Client(near, config).Handshake()
		near.Close()
	}()
	b := make([]byte, 1<<14)
	far.SetDeadline(time.Now().Add(patience))
	k, err := far.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return b[:k]
}

func TestNewRefuses(t *testing.T) {
	if _, err := New(Config{Guest: guestMAC}); err == nil {
		t.Error("no policy")
	}
	if _, err := New(Config{Policy: nictest.Compile(t, policy.Policy{})}); err == nil {
		t.Error("no address")
	}
}

// A guest gets no more than its rate allows, and nothing more when it has had all its bytes.
func TestMetered(t *testing.T) {
	server := serveTCP(t, echoBack)
	const rate, size = 1 << 20, 300 << 10
	g := newGuest(t, Config{Policy: nictest.Compile(t, limited(policy.Limits{Rate: rate, Bytes: 2*size + 1}, server.String()))})
	c, err := g.dialTCP(server)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	begun := time.Now()
	go c.Write(make([]byte, size))
	if _, err := io.ReadFull(c, make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took < time.Second*size/rate-burst {
		t.Errorf("%d bytes took %v", size, took)
	}
	if s := g.net.Status(); s.SentBytes != size || s.ReceivedBytes != size {
		t.Errorf("status has %d bytes sent and %d received", s.SentBytes, s.ReceivedBytes)
	}
	c.Write([]byte("one"))
	_, sent := c.Write([]byte("more")) // has the reset if that was faster
	if n, err := io.ReadAll(c); sent == nil && err == nil || len(n) > 0 {
		t.Errorf("%d more bytes have come back", len(n))
	}
	if _, err := g.dialTCP(server); err == nil {
		t.Error("connected without a byte left")
	}
	g.refusal(policy.ReasonLimit, "tcp")
	g.net.SetPolicy(nictest.Compile(t, allow(server.String())))
	if c, err := g.dialTCP(server); err != nil {
		t.Errorf("with more bytes: %v", err)
	} else {
		c.Close()
	}
}
