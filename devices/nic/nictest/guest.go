// Package nictest has a guest for tests of networks: a network stack at the other end of the wire, and the contract that each network
// behind a card keeps.
package nictest

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/forkvm/forkvm/devices/nic"
)

// Patience is how long a guest waits for anything.
const Patience = 20 * time.Second

// Card is the address of the guest's card.
var Card = nic.MAC{2, 0, 0, 0, 0, 0x15}

const (
	nicID  = 1
	queued = 4096 // frames of the guest, at most
)

// Guest is a network stack at the other end of the wire: what a guest's kernel is to a backend. It has the addresses that every
// guest has.
type Guest struct {
	testing.TB
	Stack *stack.Stack

	wire  *channel.Endpoint
	mu    sync.Mutex // held for one call of the backend as a device has it
	net   nic.Backend
	woken chan struct{}
	done  chan struct{}
	sent  atomic.Int64 // frames
	pump  sync.WaitGroup
}

// CheckLeaks lets the test fail if goroutines are left.
func CheckLeaks(t testing.TB) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for end := time.Now().Add(Patience); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				stacks := make([]byte, 1<<18)
				t.Errorf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
				return
			}
		}
	})
}

// NewGuest attaches a guest to a backend until the test ends.
func NewGuest(t testing.TB, b nic.Backend) *Guest {
	t.Helper()
	g := &Guest{TB: t, net: b, woken: make(chan struct{}, 1), done: make(chan struct{})}
	g.wire = channel.New(queued, nic.DefaultMTU, tcpip.LinkAddress(Card[:]))
	g.boot()
	g.attach()
	g.pump.Go(g.receive)
	g.pump.Go(g.transmit)
	t.Cleanup(func() {
		close(g.done)
		g.wire.Close()
		g.pump.Wait()
		g.Stack.Destroy()
	})
	return g
}

// attach is what a device does with a backend that it has.
func (g *Guest) attach() {
	g.net.Attach(g.wake)
	g.net.SetOffloads(nic.Offloads{})
	g.wake()
}

func (g *Guest) wake() {
	select {
	case g.woken <- struct{}{}:
	default:
	}
}

// boot gives the guest its addresses, as a guest agent does.
func (g *Guest) boot() {
	g.Helper()
	g.Stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	if err := g.Stack.CreateNIC(nicID, ethernet.New(g.wire)); err != nil {
		g.Fatal(err)
	}
	var routes []tcpip.Route
	for own, gateway := range map[netip.Addr]netip.Addr{nic.Guest4: nic.Gateway4, nic.Guest6: nic.Gateway6} {
		bits, all := nic.Bits4, netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if own.Is6() {
			bits, all = nic.Bits6, netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		a := tcpip.ProtocolAddress{Protocol: protocol(own), AddressWithPrefix: tcpip.AddressWithPrefix{Address: address(own), PrefixLen: bits}}
		if err := g.Stack.AddProtocolAddress(nicID, a, stack.AddressProperties{}); err != nil {
			g.Fatal(err)
		}
		everything := tcpip.AddressWithPrefix{Address: address(all.Addr()), PrefixLen: 0}.Subnet()
		routes = append(routes, tcpip.Route{Destination: a.AddressWithPrefix.Subnet(), NIC: nicID}, tcpip.Route{Destination: everything, Gateway: address(gateway), NIC: nicID})
	}
	g.Stack.SetRouteTable(routes)
}

func protocol(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}

func address(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// transmit gives the backend what the guest's stack sends.
func (g *Guest) transmit() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g.pump.Go(func() {
		<-g.done
		cancel()
	})
	for {
		p := g.wire.ReadContext(ctx)
		if p == nil {
			return
		}
		view := p.ToView()
		g.Send(view.AsSlice())
		view.Release()
		p.DecRef()
	}
}

// Send sends a frame as it is.
func (g *Guest) Send(frame []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.net.Send(nic.Frame{Data: frame})
	g.sent.Add(1)
}

// receive takes frames as the device does, and gives them to the guest's stack.
func (g *Guest) receive() {
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

func (g *Guest) deliver(data []byte) {
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(data)})
	defer p.DecRef()
	g.wire.InjectInbound(0, p) // the Ethernet above it reads what it is
}

// Become has the guest go on as a clone, over another network, to which it brings what the one that it had has saved.
func (g *Guest) Become(b nic.Backend) {
	g.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	saved, err := g.net.Save()
	if err != nil {
		g.Fatal(err)
	}
	if err := b.Restore(saved); err != nil {
		g.Fatal(err)
	}
	if again, err := b.Save(); err != nil || string(again) != string(saved) {
		g.Errorf("saved %s, then %s, %v", saved, again, err)
	}
	g.net = b
	g.attach()
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nicID, Addr: address(a.Addr()), Port: a.Port()}
}

// DialTCP connects.
func (g *Guest) DialTCP(to netip.AddrPort) (*gonet.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	c, err := gonet.DialContextTCP(ctx, g.Stack, full(to), protocol(to.Addr()))
	if err == nil {
		c.SetDeadline(time.Now().Add(Patience))
	}
	return c, err
}

// DialUDP makes a socket for one destination.
func (g *Guest) DialUDP(to netip.AddrPort) *gonet.UDPConn {
	g.Helper()
	remote := full(to)
	c, err := gonet.DialUDP(g.Stack, nil, &remote, protocol(to.Addr()))
	if err != nil {
		g.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(Patience))
	return c
}

// Eventually waits.
func (g *Guest) Eventually(what string, done func() bool) {
	g.Helper()
	for end := time.Now().Add(Patience); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			g.Fatalf("never: %s", what)
		}
	}
}

// Unreachable is how many errors of ICMP the guest has got.
func (g *Guest) Unreachable() uint64 {
	s := g.Stack.Stats().ICMP
	return s.V4.PacketsReceived.DstUnreachable.Value() + s.V6.PacketsReceived.DstUnreachable.Value()
}

// ThereAndBack carries a megabyte to a server that sends everything back.
func (g *Guest) ThereAndBack(server netip.AddrPort) {
	g.Helper()
	c, err := g.DialTCP(server)
	if err != nil {
		g.Fatal(err)
	}
	defer c.Close()
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		c.Write(sent)
		c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, sent) {
		g.Fatalf("%d of %d bytes came back: %v", len(got), len(sent), err)
	}
}
