package usernet

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/forkvm/forkvm/devices/nic/nictest"
)

const patience = nictest.Patience

var guestMAC = nictest.Card

// guest is one at the other end of a Net's wire.
type guest struct {
	*nictest.Guest
	net   *Net
	stack *stack.Stack
}

// newNet makes a Net for which the host's loopback address is elsewhere, too.
func newNet(t testing.TB, c Config) *Net {
	t.Helper()
	c.Guest = guestMAC
	n, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	n.connect = toLoopback
	t.Cleanup(func() {
		n.Close()
		n.Close()
	})
	return n
}

func newGuest(t testing.TB, c Config) *guest {
	t.Helper()
	nictest.CheckLeaks(t)
	n := newNet(t, c)
	g := nictest.NewGuest(t, n)
	return &guest{g, n, g.Stack}
}

func (g *guest) dialTCP(to netip.AddrPort) (*gonet.TCPConn, error) {
	g.Helper()
	return g.DialTCP(to)
}

func (g *guest) dialUDP(to netip.AddrPort) *gonet.UDPConn {
	g.Helper()
	return g.DialUDP(to)
}

func (g *guest) eventually(what string, done func() bool) {
	g.Helper()
	g.Eventually(what, done)
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nicID, Addr: address(a.Addr()), Port: a.Port()}
}

// elsewhere is where servers of the host's loopback address are for a guest: stacks drop packets to such addresses.
var elsewhere = netip.MustParseAddr("93.184.216.34")

// toLoopback connects to the host's loopback address instead of elsewhere.
func toLoopback(ctx context.Context, network, at string) (net.Conn, error) {
	if a := netip.MustParseAddrPort(at); a.Addr() == elsewhere {
		at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), a.Port()).String()
	}
	return new(net.Dialer).DialContext(ctx, network, at)
}

// serveTCP runs a server on the host's loopback address and returns where a guest finds it.
func serveTCP(t testing.TB, serve func(net.Conn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(patience))
				serve(c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); conns.Wait() })
	return netip.AddrPortFrom(elsewhere, l.Addr().(*net.TCPAddr).AddrPort().Port())
}

// serveUDP answers datagrams on the host's loopback address and returns where a guest finds that.
func serveUDP(t testing.TB, answer func([]byte) []byte) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		b := make([]byte, 1<<16)
		for {
			k, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if a := answer(append([]byte(nil), b[:k]...)); a != nil {
				c.WriteToUDPAddrPort(a, from)
			}
		}
	})
	t.Cleanup(func() { c.Close(); done.Wait() })
	return netip.AddrPortFrom(elsewhere, c.LocalAddr().(*net.UDPAddr).AddrPort().Port())
}
