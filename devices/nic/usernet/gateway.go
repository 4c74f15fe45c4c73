package usernet

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/forkvm/forkvm/devices/nic"
)

const (
	nicID    = 1
	timeWait = time.Second
	// maxOpenings is how many connections the stack looks at before they are made or refused; of more it hears nothing.
	maxOpenings = 512
)

// gateway is the network stack behind the guest's card. It is made for the first packet that somebody has for it: it is most of what a network
// takes, and until a guest is ready it has said nothing to the gateway as a rule.
type gateway struct {
	stack atomic.Pointer[stack.Stack] // nil until it is made

	mu     sync.Mutex // held while it is made
	dns    *resolver
	closed bool
}

// reach returns the stack, which it makes if there is none. It is nil once the network has been closed.
func (n *Net) reach() *stack.Stack {
	g := &n.gateway
	if s := g.stack.Load(); s != nil {
		return s
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.stack.Load(); s != nil || g.closed {
		return s
	}
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	var err error
	if g.dns, err = n.configure(s); err != nil {
		panic(err) // neither the guest nor the host has a say in it
	}
	g.stack.Store(s)
	return s
}

// close has nobody make a stack any more, and ends the resolver. When nothing of the network uses the stack any more, destroy ends that.
func (g *gateway) close() (destroy func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	if g.dns != nil {
		g.dns.close()
	}
	s := g.stack.Load()
	if s == nil {
		return func() {}
	}
	return s.Destroy
}

// configure makes a stack the gateway, and the resolver beside it.
func (n *Net) configure(s *stack.Stack) (*resolver, error) {
	if err := s.CreateNIC(nicID, n.link); err != nil {
		return nil, fmt.Errorf("create interface: %s", err)
	}
	for _, a := range []netip.Addr{nic.Gateway4, nic.Resolver4, nic.Gateway6, nic.Resolver6} {
		bits := 24
		if a.Is6() {
			bits = 64
		}
		address := tcpip.ProtocolAddress{
			Protocol:          networkProtocol(a),
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFromSlice(a.AsSlice()), PrefixLen: bits},
		}
		if err := s.AddProtocolAddress(nicID, address, stack.AddressProperties{}); err != nil {
			return nil, fmt.Errorf("add address %v: %s", a, err)
		}
	}
	// Where the guest is need not be asked for, and an answer would be the guest's to give.
	for _, a := range []netip.Addr{nic.Guest4, nic.Guest6} {
		if err := s.AddStaticNeighbor(nicID, networkProtocol(a), tcpip.AddrFromSlice(a.AsSlice()), tcpip.LinkAddress(n.config.Guest[:])); err != nil {
			return nil, fmt.Errorf("add neighbour %v: %s", a, err)
		}
	}
	everything4, _ := tcpip.NewSubnet(tcpip.AddrFrom4([4]byte{}), tcpip.MaskFrom(string(make([]byte, 4))))
	everything6, _ := tcpip.NewSubnet(tcpip.AddrFrom16([16]byte{}), tcpip.MaskFrom(string(make([]byte, 16))))
	s.SetRouteTable([]tcpip.Route{{Destination: everything4, NIC: nicID}, {Destination: everything6, NIC: nicID}})
	// Every destination is ours, and so is every source of an answer.
	s.SetPromiscuousMode(nicID, true)
	s.SetSpoofing(nicID, true)
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(s, 0, maxOpenings, n.connection).HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(s, n.datagram).HandlePacket)
	// Nothing is late or twice on this wire, so that a connection that has ended need not be remembered.
	wait := tcpip.TCPTimeWaitTimeoutOption(timeWait)
	if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, &wait); err != nil {
		return nil, fmt.Errorf("set time to wait: %s", err)
	}
	return newResolver(n, s)
}

func networkProtocol(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}
