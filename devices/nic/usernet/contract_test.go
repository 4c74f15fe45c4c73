package usernet

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// world is the host's loopback addresses, which guests know by others.
type world struct{}

// elsewhere6 is what elsewhere is of IPv6.
var elsewhere6 = netip.MustParseAddr("2606:2800:220:1::34")

func (world) New(t testing.TB, rules *policy.Rules) nictest.Network {
	n := newNet(t, Config{Policy: rules})
	n.connect = func(ctx context.Context, network, at string) (net.Conn, error) {
		if a := netip.MustParseAddrPort(at); a.Addr() == elsewhere6 {
			at = netip.AddrPortFrom(netip.IPv6Loopback(), a.Port()).String()
		}
		return toLoopback(ctx, network, at)
	}
	return n
}

func (world) ListenTCP(t testing.TB, six bool) (net.Listener, netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", loopback(six))
	if err != nil {
		t.Fatal(err)
	}
	return l, outside(l.Addr(), six)
}

func (world) ListenUDP(t testing.TB, six bool) (net.PacketConn, netip.AddrPort) {
	t.Helper()
	c, err := net.ListenPacket("udp", loopback(six))
	if err != nil {
		t.Fatal(err)
	}
	return c, outside(c.LocalAddr(), six)
}

func loopback(six bool) string {
	if six {
		return "[::1]:0"
	}
	return "127.0.0.1:0"
}

// outside is where guests find a server.
func outside(at net.Addr, six bool) netip.AddrPort {
	a := elsewhere
	if six {
		a = elsewhere6
	}
	return netip.AddrPortFrom(a, netip.MustParseAddrPort(at.String()).Port())
}

func TestContract(t *testing.T) { nictest.Run(t, world{}) }
