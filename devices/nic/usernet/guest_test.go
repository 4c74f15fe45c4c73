package usernet

import (
	"context"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

const patience = 20 * time.Second

var guestMAC = nic.MAC{2, 0, 0, 0, 0, 0x15}

// guest is a network stack at the other end of the wire: what a guest's kernel is to a Net.
type guest struct {
	testing.TB
	net   *Net
	stack *stack.Stack
	wire  *cable
	mu    sync.Mutex // held for one call of the Net as a device has it
	woken chan struct{}
	done  chan struct{}
}

// cable is the guest's link: what it sends the Net gets at once.
type cable struct {
	*link
	guest *guest
}

func (c *cable) LinkAddress() tcpip.LinkAddress { return tcpip.LinkAddress(guestMAC[:]) }

func (c *cable) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	for _, p := range list.AsSlice() {
		view := p.ToView()
		c.guest.send(view.AsSlice())
		view.Release()
	}
	return list.Len(), nil
}

func compile(t testing.TB, p policy.Policy) *policy.Rules {
	t.Helper()
	r, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// checkLeaks lets the test fail if goroutines are left.
func checkLeaks(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for end := time.Now().Add(patience); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				stacks := make([]byte, 1<<18)
				t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
	})
}

func newGuest(t testing.TB, c Config) *guest {
	t.Helper()
	checkLeaks(t)
	c.Guest = guestMAC
	n, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	n.connect = toLoopback
	g := &guest{TB: t, net: n, woken: make(chan struct{}, 1), done: make(chan struct{})}
	g.wire = &cable{newLink(nic.DefaultMTU), g}
	g.boot()
	n.Attach(func() {
		select {
		case g.woken <- struct{}{}:
		default:
		}
	})
	n.SetOffloads(nic.Offloads{})
	var pump sync.WaitGroup
	pump.Go(g.receive)
	t.Cleanup(func() {
		close(g.done)
		pump.Wait()
		g.stack.Destroy()
		n.Close()
		n.Close()
	})
	return g
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

// boot gives the guest its addresses, as a guest agent does.
func (g *guest) boot() {
	g.Helper()
	g.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	if err := g.stack.CreateNIC(nicID, g.wire); err != nil {
		g.Fatal(err)
	}
	var routes []tcpip.Route
	for own, gateway := range map[netip.Addr]netip.Addr{Guest4: Gateway4, Guest6: Gateway6} {
		bits, all := Bits4, netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if own.Is6() {
			bits, all = Bits6, netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		a := tcpip.ProtocolAddress{Protocol: networkProtocol(own), AddressWithPrefix: tcpip.AddressWithPrefix{Address: address(own), PrefixLen: bits}}
		if err := g.stack.AddProtocolAddress(nicID, a, stack.AddressProperties{}); err != nil {
			g.Fatal(err)
		}
		everything := tcpip.AddressWithPrefix{Address: address(all.Addr()), PrefixLen: 0}.Subnet()
		routes = append(routes, tcpip.Route{Destination: a.AddressWithPrefix.Subnet(), NIC: nicID}, tcpip.Route{Destination: everything, Gateway: address(gateway), NIC: nicID})
	}
	g.stack.SetRouteTable(routes)
}

func (g *guest) send(frame []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.net.Send(nic.Frame{Data: frame})
}

// receive takes frames as the device does, and gives them to the guest's stack.
func (g *guest) receive() {
	for {
		select {
		case <-g.done:
			return
		case <-g.woken:
		}
		for {
			g.mu.Lock()
			f, ok := g.net.Next()
			var data []byte
			if ok {
				data = append(data, f.Data...)
				g.net.Taken()
			}
			g.mu.Unlock()
			if !ok {
				break
			}
			g.deliver(data)
		}
	}
}

func (g *guest) deliver(data []byte) {
	g.wire.mu.Lock()
	d := g.wire.dispatcher
	g.wire.mu.Unlock()
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(data)})
	defer p.DecRef()
	g.wire.ParseHeader(p)
	p.NetworkProtocolNumber = header.Ethernet(p.LinkHeader().Slice()).Type()
	d.DeliverNetworkPacket(p.NetworkProtocolNumber, p)
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nicID, Addr: address(a.Addr()), Port: a.Port()}
}

func (g *guest) dialTCP(to netip.AddrPort) (*gonet.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := gonet.DialContextTCP(ctx, g.stack, full(to), networkProtocol(to.Addr()))
	if err == nil {
		c.SetDeadline(time.Now().Add(patience))
	}
	return c, err
}

func (g *guest) dialUDP(to netip.AddrPort) *gonet.UDPConn {
	g.Helper()
	remote := full(to)
	c, err := gonet.DialUDP(g.stack, nil, &remote, networkProtocol(to.Addr()))
	if err != nil {
		g.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	return c
}

func (g *guest) eventually(what string, done func() bool) {
	g.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			g.Fatalf("never: %s", what)
		}
	}
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
