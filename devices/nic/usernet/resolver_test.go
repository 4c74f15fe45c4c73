package usernet

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// ask makes a query; with room, one with EDNS.
func ask(id uint16, name string, kind uint16, room uint16) []byte {
	m := binary.BigEndian.AppendUint16(nil, id)
	m = append(m, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)
	m = appendName(m, name)
	m = binary.BigEndian.AppendUint16(m, kind)
	m = append(m, 0, 1)
	if room > 0 {
		m[11] = 1
		m = append(m, 0, 0, typeOPT, byte(room>>8), byte(room), 0, 0, 0, 0, 0, 0)
	}
	return m
}

func appendName(m []byte, name string) []byte {
	for label := range strings.SplitSeq(name, ".") {
		m = append(append(m, byte(len(label))), label...)
	}
	return append(m, 0)
}

// answerWith makes an answer of records, each with the question's name.
func answerWith(m []byte, q query, code uint16, kind uint16, data ...[]byte) []byte {
	r := q.reply(m, code, false)
	binary.BigEndian.PutUint16(r[6:], uint16(len(data)))
	for _, d := range data {
		r = append(r, 0xc0, dnsHeader)
		r = binary.BigEndian.AppendUint16(r, kind)
		r = append(r, 0, 1, 0, 0, 0, 60)
		r = binary.BigEndian.AppendUint16(r, uint16(len(d)))
		r = append(r, d...)
	}
	return r
}

// zone answers for the tests' names.
func zone(m []byte) []byte {
	q, ok := readQuery(m)
	if !ok {
		return nil
	}
	four := func(a string) []byte { b := netip.MustParseAddr(a).As4(); return b[:] }
	switch {
	case strings.HasPrefix(q.name, "none."):
		return q.reply(m, 3, false)
	case strings.HasPrefix(q.name, "broken."):
		return q.reply(m, codeServerFailure, false)
	case strings.HasPrefix(q.name, "silent."):
		return nil
	case q.kind == 16: // TXT
		return answerWith(m, q, 0, 16, bytes.Repeat([]byte{200}, 201), bytes.Repeat([]byte{200}, 201), bytes.Repeat([]byte{200}, 201))
	case q.kind != typeA:
		return q.reply(m, 0, false)
	case strings.HasPrefix(q.name, "many."):
		var all [][]byte
		for i := range 60 {
			all = append(all, []byte{93, 184, 217, byte(i)})
		}
		return answerWith(m, q, 0, typeA, all...)
	case strings.HasPrefix(q.name, "rebound."):
		return answerWith(m, q, 0, typeA, four("169.254.169.254"))
	}
	return answerWith(m, q, 0, typeA, four("93.184.216.34"))
}

// exchangeUDP sends a query of the guest's and returns the answer.
func (g *guest) exchangeUDP(at netip.Addr, m []byte) []byte {
	g.Helper()
	c := g.dialUDP(netip.AddrPortFrom(at, dnsPort))
	defer c.Close()
	if _, err := c.Write(m); err != nil {
		g.Fatal(err)
	}
	b := make([]byte, 1<<16)
	k, err := c.Read(b)
	if err != nil {
		g.Fatal(err)
	}
	return b[:k]
}

func (g *guest) lookup(name string) (found netip.Addr) {
	g.Helper()
	m := ask(7, name, typeA, 0)
	q, _ := readQuery(m)
	addresses(g.exchangeUDP(nic.Resolver4, m), q, func(a netip.Addr, _ time.Duration) { found = a })
	return found
}

// Case D3: big answers, truncation, TCP, names without addresses, resolvers that fail.
func TestCaseD3(t *testing.T) {
	upstream := serveFramed(t)
	g := newGuest(t, Config{
		Policy:    nictest.Compile(t, policy.Policy{Mode: policy.Allowlist, Allow: []string{"*.example"}}),
		Resolvers: []netip.AddrPort{upstream},
	})
	for _, tt := range []struct {
		name      string
		query     []byte
		code      byte
		cut       bool
		answers   int
		atMost    int
		byAddress netip.Addr
	}{
		{"one address", ask(1, "a.example", typeA, 0), 0, false, 1, 512, nic.Resolver4},
		{"over IPv6", ask(2, "a.example", typeA, 0), 0, false, 1, 512, nic.Resolver6},
		{"many without EDNS", ask(3, "many.example", typeA, 0), 0, true, 0, 512, nic.Resolver4},
		{"many with EDNS", ask(4, "many.example", typeA, 4096), 0, false, 60, 4096, nic.Resolver4},
		{"many with little room", ask(5, "many.example", typeA, 600), 0, true, 0, 600, nic.Resolver4},
		{"no such type", ask(6, "a.example", typeAAAA, 0), 0, false, 0, 512, nic.Resolver4},
		{"no such name", ask(7, "none.example", typeA, 0), 3, false, 0, 512, nic.Resolver4},
		{"a failing resolver", ask(8, "broken.example", typeA, 0), 2, false, 0, 512, nic.Resolver4},
		{"another zone", ask(9, "data.evil.test", typeA, 0), codeRefused, false, 0, 512, nic.Resolver4},
		{"another zone's text", ask(10, "data.evil.test", 16, 0), codeRefused, false, 0, 512, nic.Resolver4},
		{"hidden names", ask(11, "a.example", typeHTTPS, 0), 0, false, 0, 512, nic.Resolver4},
		{"transfer", ask(12, "a.example", typeAXFR, 0), codeRefused, false, 0, 512, nic.Resolver4},
		{"no question", make([]byte, 12), codeFormat, false, 0, 512, nic.Resolver4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := g.exchangeUDP(tt.byAddress, tt.query)
			answers := int(binary.BigEndian.Uint16(m[6:]))
			if m[3]&15 != tt.code || m[2]&2 != 0 != tt.cut || answers != tt.answers || len(m) > tt.atMost || !bytes.Equal(m[:2], tt.query[:2]) {
				t.Errorf("answer of %d bytes with code %d, cut %v, %d records, id %x", len(m), m[3]&15, m[2]&2 != 0, answers, m[:2])
			}
		})
	}
	t.Run("TCP", func(t *testing.T) {
		for _, at := range []netip.Addr{nic.Resolver4, nic.Resolver6} {
			c, err := g.dialTCP(netip.AddrPortFrom(at, dnsPort))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			for id := range uint16(2) {
				if err := writeFramed(c, ask(id, "many.example", typeA, 0)); err != nil {
					t.Fatal(err)
				}
				m, err := readFramed(c)
				if err != nil || binary.BigEndian.Uint16(m[6:]) != 60 || binary.BigEndian.Uint16(m) != id {
					t.Fatalf("answer %x, %v", m, err)
				}
			}
		}
	})
	t.Run("both kinds from one socket", func(t *testing.T) {
		c := g.dialUDP(netip.AddrPortFrom(nic.Resolver4, dnsPort))
		defer c.Close()
		c.Write(ask(1, "a.example", typeA, 0))
		c.Write(ask(2, "a.example", typeAAAA, 0))
		seen := map[byte]bool{}
		for range 2 {
			b := make([]byte, 512)
			if _, err := c.Read(b); err != nil {
				t.Fatal(err)
			}
			seen[b[1]] = true
		}
		if len(seen) != 2 {
			t.Errorf("answers to %v", seen)
		}
	})
	t.Run("a silent resolver", func(t *testing.T) {
		begun := time.Now()
		if m := g.exchangeUDP(nic.Resolver4, ask(1, "silent.example", typeA, 0)); m[3]&15 != codeServerFailure {
			t.Errorf("code %d", m[3]&15)
		}
		t.Logf("answered after %v", time.Since(begun))
	})
	g.refusal(policy.ReasonNotAllowed, "dns")
}

// local is where the host finds a server.
func local(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), a.Port())
}

// serveFramed is a resolver that answers by UDP and by TCP.
func serveFramed(t *testing.T) netip.AddrPort {
	at := local(serveTCP(t, func(c net.Conn) {
		for {
			m, err := readFramed(c)
			if err != nil || writeFramed(c, zone(m)) != nil {
				return
			}
		}
	}))
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		t.Skipf("port %d is taken: %v", at.Port(), err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 4096)
		for {
			k, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if a := zone(b[:k]); a != nil {
				c.WriteToUDPAddrPort(a, from)
			}
		}
	}()
	t.Cleanup(func() { c.Close(); <-done })
	return at
}

// Case D4: many queries, each from a port of its own, are answered with a bounded number of sockets.
func TestCaseD4Queries(t *testing.T) {
	var asked atomic.Int64
	upstream := local(serveUDP(t, func(m []byte) []byte { asked.Add(1); return zone(m) }))
	g := newGuest(t, Config{Policy: nictest.Compile(t, policy.Policy{Mode: policy.Public}), Resolvers: []netip.AddrPort{upstream}})
	for i := range 1000 {
		m := g.exchangeUDP(nic.Resolver4, ask(uint16(i), "a.example", typeA, 0))
		if binary.BigEndian.Uint16(m) != uint16(i) || binary.BigEndian.Uint16(m[6:]) != 1 {
			t.Fatalf("query %d: %x", i, m)
		}
	}
	if g.net.udp.count() != 0 {
		t.Errorf("%d sessions for queries", g.net.udp.count())
	}
}

func TestPins(t *testing.T) {
	now := time.Unix(1000, 0)
	p := newPins()
	p.now = func() time.Time { return now }
	a := netip.MustParseAddr("93.184.216.34")
	p.add("a.example", a, 0)
	p.add("b.example", a, time.Hour)
	if n := len(p.names(a)); n != 2 {
		t.Errorf("%d names", n)
	}
	now = now.Add(minPin + 1)
	if n := p.names(a); len(n) != 1 || n[0] != "b.example" {
		t.Errorf("names %v after the first has ended", n)
	}
	for i := range 2 * maxPins {
		p.add("c.example", netip.AddrFrom4([4]byte{1, byte(i >> 16), byte(i >> 8), byte(i)}), 0)
	}
	for i := range 2 * maxNames {
		p.add(strings.Repeat("x", i+1), a, 0)
	}
	if len(p.byIP) > maxPins || len(p.byIP[a]) > maxNames {
		t.Errorf("%d addresses, %d names of one", len(p.byIP), len(p.byIP[a]))
	}
}
