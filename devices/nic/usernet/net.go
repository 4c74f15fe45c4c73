// Package usernet is a network for one guest in user space: gVisor's network stack as the gateway behind the guest's card, and
// the host's sockets behind that. It needs no privilege, and no two guests share anything.
//
// Everything that a guest may reach is decided here, by package policy: when it asks its resolver for a name, when it opens a
// connection or sends the first datagram, and, where only a name leads to an address, by what the client then asks the server
// for. What is refused is answered at once: REFUSED by the resolver, a reset, or an ICMP error.
//
// # Inside
//
// Net is a nic.Backend. Its filter looks at each frame of the guest before the stack does: a frame has to come from the
// guest's own addresses, and has to be ARP, neighbour discovery, TCP, UDP or ICMP in the plainest form. The stack takes
// the destination of any address for its own (it is promiscuous): a forwarder gets each new connection (relay) and each new
// pair of UDP addresses (session).
//
// The stack is made when somebody has a packet for it (gateway). What waits for sockets is done by goroutines that are used again (crew).
//
// Frames for the guest wait in a queue of bounded size. When it is full the stack hears that they were not sent.
//
// # Clones
//
// The far ends of a guest's connections do not follow it into a clone, nor over a reset. Save notes which connections there
// are; after Restore, once the guest has its new addresses (Renewed), each gets a segment that no connection can take for its
// own, some times (nic.Ending). Its kernel answers with what it expects (RFC 5961, section 4), and the stack, which knows no such connection, with
// a reset that fits.
package usernet

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// Config is what a network is made of.
type Config struct {
	// Guest is the address of the guest's card, MTU the link's.
	Guest nic.MAC
	MTU   int
	// Policy is what the guest may reach.
	Policy *policy.Rules
	// SessionIdle is after how long without a datagram a session of UDP ends; 30 s if 0.
	SessionIdle time.Duration
	// Resolvers are asked for the names that the guest asks for, in this order. Without one no name resolves.
	Resolvers []netip.AddrPort
	// Ports are the host's behind which are the guest's.
	Ports []policy.Port
}

// Net is the network of one guest. Its methods may be called from any goroutine, except for those of nic.Backend.
type Net struct {
	config  Config
	link    *link
	filter  filter
	gateway gateway
	pins    *pins
	refused refusals
	host    hostAddresses
	relays  relays
	udp     sessions
	meters  meters
	doors   []io.Closer // of published ports
	ending  *nic.Ending
	pings   chan struct{} // one for each echo request that may be on its way
	buffers sync.Pool     // *[copyBuffer]byte
	// datagrams has buffers for sessions.
	datagrams datagramBuffers

	rules atomic.Pointer[policy.Rules]
	// connect opens the host's sockets, another way in tests.
	connect func(ctx context.Context, network, address string) (net.Conn, error)

	// life ends with Close, and connections with each Restore.
	life   context.Context
	end    context.CancelFunc
	crew   crew
	mu     sync.Mutex // guards what follows
	closed bool
}

const sessionIdle = 30 * time.Second

// New returns a network that the guest's card can be attached to.
func New(c Config) (*Net, error) {
	if c.Policy == nil || !c.Guest.Valid() {
		return nil, fmt.Errorf("create network: no policy or no address of the guest")
	}
	if c.MTU == 0 {
		c.MTU = nic.DefaultMTU
	}
	if c.SessionIdle == 0 {
		c.SessionIdle = sessionIdle
	}
	n := &Net{
		config:  c,
		filter:  newFilter(c.Guest),
		pins:    newPins(),
		refused: newRefusals(),
		pings:   make(chan struct{}, maxPings),
		connect: new(net.Dialer).DialContext,
	}
	n.link = newLink(c.MTU, func(packets int) bool { return n.keepsPace(&n.meters.packetsReceived, packets) })
	n.ending = nic.NewEnding(c.Guest, n.probe)
	n.life, n.end = context.WithCancel(context.Background())
	n.crew.init()
	n.relays.init(n.life)
	n.udp.init()
	n.rules.Store(c.Policy)
	if err := n.publish(c.Ports); err != nil {
		n.Close()
		return nil, fmt.Errorf("create network: %w", err)
	}
	return n, nil
}

// SetPolicy replaces the policy. Connections and sessions that it does not allow end.
func (n *Net) SetPolicy(r *policy.Rules) {
	n.rules.Store(r)
	n.udp.shrink(r.Limits().Sessions)
	n.relays.each(func(f *relay) {
		if !f.inbound && !n.decide(&f.target).Allowed {
			f.abort()
		}
	})
	n.udp.each(func(s *session) {
		if !s.inbound && !n.decide(&s.target).Allowed {
			s.close()
		}
	})
}

// decide asks the policy, with what is known of the address, and notes a refusal.
func (n *Net) decide(t *policy.Target) policy.Verdict {
	t.Names = n.pins.names(t.Address)
	t.Host = n.host.has
	var v policy.Verdict
	if nic.OnLink(t.Address) {
		v = policy.Verdict{Reason: policy.ReasonSpecial} // the gateway serves nothing but names
	} else {
		r := n.rules.Load()
		if v = r.Decide(*t); v.Allowed && n.meters.spent(r.Limits()) {
			v = policy.Verdict{Reason: policy.ReasonLimit}
		}
	}
	if !v.Allowed {
		n.refused.note(t, v.Reason)
	}
	return v
}

// Close ends every connection and waits for all goroutines of the network.
func (n *Net) Close() error {
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	n.mu.Unlock()
	if closed {
		return nil
	}
	n.ending.Set(nil)
	n.end()
	n.closeDoors()
	n.forget()
	destroy := n.gateway.close()
	n.crew.wait()
	destroy()
	n.link.drop()
	return nil
}

// start runs work that Close waits for, unless it has begun.
func (n *Net) start(work func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.crew.run(work, n.life.Done())
	return true
}

// dial opens a socket of the host to a target.
func (n *Net) dial(ctx context.Context, t policy.Target) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return n.connect(ctx, t.Protocol.String(), netip.AddrPortFrom(t.Address, t.Port).String())
}

// dialTimeout is how long a server may take to accept.
const dialTimeout = 20 * time.Second

// Status says what has become of what the guest tried.
func (n *Net) Status() policy.Status {
	s := policy.Status{
		Sessions: n.udp.count(), Frames: n.Frames(), SentBytes: n.meters.sent.passed.Load(), ReceivedBytes: n.meters.received.passed.Load(),
	}
	n.relays.each(func(*relay) { s.Connections++ })
	s.Refused, s.Refusals = n.Refusals()
	return s
}
