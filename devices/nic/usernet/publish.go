package usernet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// A guest that does not answer is not waited for longer than this.
const inboundTimeout = 10 * time.Second

// publish opens the host's ports behind which are the guest's. What comes in comes from the gateway, as the guest sees it, and is
// the host's business: the policy is about what the guest begins.
func (n *Net) publish(ports []policy.Port) error {
	for _, p := range ports {
		if p.Protocol == policy.UDP {
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(p.Host))
			if err != nil {
				return fmt.Errorf("publish port %v: %w", p, err)
			}
			n.doors = append(n.doors, c)
			n.start(func() { n.receive(c, p.Guest) })
			continue
		}
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(p.Host))
		if err != nil {
			return fmt.Errorf("publish port %v: %w", p, err)
		}
		n.doors = append(n.doors, l)
		n.start(func() { n.accept(l, p.Guest) })
	}
	return nil
}

func (n *Net) closeDoors() {
	for _, d := range n.doors {
		d.Close()
	}
}

// accept connects whoever comes to a port of the guest.
func (n *Net) accept(l *net.TCPListener, port uint16) {
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			return
		}
		if !n.start(func() { n.inbound(c, port) }) {
			c.Close()
		}
	}
}

// inbound is relay the other way round.
func (n *Net) inbound(client *net.TCPConn, port uint16) {
	defer client.Close()
	f := &relay{inbound: true}
	ctx, cancel := n.relays.context()
	defer cancel()
	f.cancel = cancel
	limits := n.rules.Load().Limits()
	if n.meters.spent(limits) || !n.relays.add(f, limits.Connections) {
		_ = client.SetLinger(0) // with a reset
		return
	}
	defer n.relays.remove(f)
	guest, end, err := n.dialGuest(ctx, port)
	if err != nil {
		_ = client.SetLinger(0)
		return
	}
	defer guest.Close()
	if f.stand(guest, end, client) {
		n.move(ctx, f, false)
	}
}

// dialGuest connects to a port of the guest, from the gateway.
func (n *Net) dialGuest(ctx context.Context, port uint16) (*gonet.TCPConn, tcpip.Endpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, inboundTimeout)
	defer cancel()
	s := n.reach()
	if s == nil {
		return nil, nil, net.ErrClosed
	}
	var queue waiter.Queue
	end, failed := s.NewEndpoint(tcp.ProtocolNumber, networkProtocol(nic.Guest4), &queue)
	if failed != nil {
		return nil, nil, fmt.Errorf("connect to guest: %s", failed)
	}
	entry, ready := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	failed = end.Bind(tcpip.FullAddress{NIC: nicID, Addr: address(nic.Gateway4)})
	if failed == nil {
		failed = end.Connect(tcpip.FullAddress{NIC: nicID, Addr: address(nic.Guest4), Port: port})
	}
	if _, begun := failed.(*tcpip.ErrConnectStarted); begun {
		select {
		case <-ready:
			failed = end.LastError()
		case <-ctx.Done():
			failed = &tcpip.ErrTimeout{}
		}
	}
	if failed != nil {
		end.Abort()
		return nil, nil, fmt.Errorf("connect to guest: %s", failed)
	}
	return gonet.NewTCPConn(&queue, end), end, nil
}

// receive passes datagrams to a port of the guest; each sender has a session.
func (n *Net) receive(c *net.UDPConn, port uint16) {
	senders := &inboundSessions{by: map[netip.AddrPort]*session{}}
	buffer := make([]byte, maxDatagram)
	for {
		k, from, err := c.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return
		}
		s := senders.get(from)
		if s == nil {
			if s = n.newInbound(c, from, port, senders); s == nil {
				continue
			}
		}
		n.udp.used(s)
		if n.pass(&n.meters.received, k) {
			_, _ = s.guest.Write(buffer[:k])
		}
	}
}

// inboundSessions are those of one port of the host, by who sends.
type inboundSessions struct {
	mu sync.Mutex
	by map[netip.AddrPort]*session
}

func (i *inboundSessions) get(from netip.AddrPort) *session {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.by[from]
}

// drop forgets a session, unless who sends has another one.
func (i *inboundSessions) drop(from netip.AddrPort, s *session) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.by[from] == s {
		delete(i.by, from)
	}
}

func (n *Net) newInbound(c *net.UDPConn, from netip.AddrPort, port uint16, all *inboundSessions) *session {
	out, err := newOutlet(c, socketAddress(from))
	stack := n.reach()
	if err != nil || stack == nil {
		return nil
	}
	var queue waiter.Queue
	end, failed := stack.NewEndpoint(udp.ProtocolNumber, networkProtocol(nic.Guest4), &queue)
	if failed != nil {
		return nil
	}
	failed = end.Bind(tcpip.FullAddress{NIC: nicID, Addr: address(nic.Gateway4)})
	if failed == nil {
		failed = end.Connect(tcpip.FullAddress{NIC: nicID, Addr: address(nic.Guest4), Port: port})
	}
	if failed != nil {
		end.Close()
		return nil
	}
	s := &session{inbound: true, guest: gonet.NewUDPConn(&queue, end), end: end, out: out}
	s.ended = func() {
		n.udp.remove(s)
		all.drop(from, s)
	}
	all.mu.Lock()
	all.by[from] = s
	all.mu.Unlock()
	n.udp.add(s, n.rules.Load().Limits().Sessions)
	n.expire(s)
	n.listen(s, &queue)
	return s
}

// expire ends a session in which no datagram passes either way.
func (n *Net) expire(s *session) {
	idle := s.idle()
	if idle >= n.config.SessionIdle || n.life.Err() != nil {
		s.close()
		return
	}
	time.AfterFunc(n.config.SessionIdle-idle, func() { n.expire(s) })
}
