package usernet

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

const (
	dnsPort = 53
	// maxQueries is how many queries wait for the host's resolvers at a time; each has a socket.
	maxQueries = 64
	// maxQuery is how long a query may be: those of clients have a hundredth of it.
	maxQuery = 4096
	// maxAskers is how many connections the guest's programs may have to the resolver.
	maxAskers = 32
	askerIdle = 10 * time.Second
	// A resolver that does not answer is asked again, or the next one is: all of it is over before a client gives up, which is
	// after 5 s.
	queryAttempts = 3
	queryTimeout  = 1300 * time.Millisecond
)

// resolver answers the guest's queries: it passes on what the policy allows, and pins what is answered.
type resolver struct {
	net       *Net
	queries   chan struct{}
	askers    chan struct{}
	packets   []*gonet.UDPConn
	listeners []*gonet.TCPListener

	mu    sync.Mutex
	conns map[net.Conn]struct{} // nil once closed
}

func newResolver(n *Net, s *stack.Stack) (*resolver, error) {
	r := &resolver{
		net: n, queries: make(chan struct{}, maxQueries), askers: make(chan struct{}, maxAskers), conns: map[net.Conn]struct{}{},
	}
	for _, a := range []netip.Addr{nic.Resolver4, nic.Resolver6} {
		at := tcpip.FullAddress{NIC: nicID, Addr: address(a), Port: dnsPort}
		packets, err := gonet.DialUDP(s, &at, nil, networkProtocol(a))
		if err != nil {
			return r, fmt.Errorf("open resolver (%v): %w", a, err)
		}
		r.packets = append(r.packets, packets)
		listener, err := gonet.ListenTCP(s, at, networkProtocol(a))
		if err != nil {
			return r, fmt.Errorf("open resolver (%v): %w", a, err)
		}
		r.listeners = append(r.listeners, listener)
		n.start(func() { r.servePackets(packets) })
		n.start(func() { r.accept(listener) })
	}
	return r, nil
}

func (r *resolver) close() {
	for _, c := range r.packets {
		c.Close()
	}
	for _, l := range r.listeners {
		l.Shutdown()
		l.Close()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

// servePackets answers queries by UDP. As many as may wait are answered at a time; others wait in the socket.
func (r *resolver) servePackets(c *gonet.UDPConn) {
	buffer := make([]byte, maxQuery)
	for {
		k, from, err := c.ReadFrom(buffer)
		if err != nil {
			return
		}
		m := append([]byte(nil), buffer[:k]...)
		r.queries <- struct{}{}
		if !r.net.start(func() {
			defer func() { <-r.queries }()
			if answer := r.answer(m, false); answer != nil {
				_, _ = c.WriteTo(answer, from)
			}
		}) {
			<-r.queries
			return
		}
	}
}

func (r *resolver) accept(l *gonet.TCPListener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		select {
		case r.askers <- struct{}{}:
		default:
			c.Close()
			continue
		}
		r.mu.Lock()
		open := r.conns != nil
		if open {
			r.conns[c] = struct{}{}
		}
		r.mu.Unlock()
		if !open || !r.net.start(func() { r.serveConn(c) }) {
			<-r.askers
			c.Close()
			return
		}
	}
}

// serveConn answers queries on a connection, one after the other (RFC 7766).
func (r *resolver) serveConn(c net.Conn) {
	defer func() {
		c.Close()
		r.mu.Lock()
		delete(r.conns, c)
		r.mu.Unlock()
		<-r.askers
	}()
	for {
		c.SetDeadline(time.Now().Add(askerIdle))
		m, err := readFramed(c)
		if err != nil {
			return
		}
		r.queries <- struct{}{}
		answer := r.answer(m, true)
		<-r.queries
		if answer == nil || writeFramed(c, answer) != nil {
			return
		}
	}
}

// readFramed reads a message behind its length (RFC 1035, section 4.2.2).
func readFramed(c io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	m := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(c, m)
	return m, err
}

func writeFramed(c io.Writer, m []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(m))), m...))
	return err
}

// answer returns the answer to a query, nil if it is not worth one.
func (r *resolver) answer(m []byte, stream bool) []byte {
	q, ok := readQuery(m)
	rules := r.net.rules.Load()
	switch {
	case len(m) < dnsHeader || m[2]&0x80 != 0:
		return nil
	case !ok:
		return query{flags: q.flags}.reply(m, codeFormat, false)
	case q.flags&opcodeMask != 0:
		return q.reply(m, codeNotImplemented, false)
	case q.class != classInternet || q.kind == typeAXFR || q.kind == typeIXFR:
		r.net.refused.noteName(q.name, policy.ReasonProtocol)
		return q.reply(m, codeRefused, false)
	case !rules.Resolves(q.name):
		reason := policy.ReasonNotAllowed
		if rules.Mode() == policy.NoNetwork {
			reason = policy.ReasonNoNetwork
		}
		r.net.refused.noteName(q.name, reason)
		return q.reply(m, codeRefused, false)
	case rules.Mode() == policy.Allowlist && (q.kind == typeHTTPS || q.kind == typeSVCB):
		// With what is in these records a client would hide the name of the server it asks for.
		return q.reply(m, 0, false)
	}
	answer, err := r.ask(q, m, stream)
	if err != nil {
		return q.reply(m, codeServerFailure, false)
	}
	copy(answer, m[:2])
	addresses(answer, q, func(a netip.Addr, ttl time.Duration) { r.net.pins.add(q.name, a, ttl) })
	if !stream && len(answer) > q.room {
		return q.reply(m, uint16(answer[3]&15), true)
	}
	return answer
}

var errNoResolver = errors.New("no resolver")

// ask passes a query on to the host's resolvers, under a number that the guest does not know.
func (r *resolver) ask(q query, m []byte, stream bool) ([]byte, error) {
	list := r.net.config.Resolvers
	if len(list) == 0 {
		return nil, errNoResolver
	}
	sent := append([]byte(nil), m...)
	rand.Read(sent[:2]) // never fails (crypto/rand)
	var err error
	for i := range queryAttempts {
		ctx, cancel := context.WithTimeout(r.net.life, queryTimeout)
		var answer []byte
		if answer, err = askOne(ctx, list[i%len(list)], q, sent, stream); err == nil {
			cancel()
			return answer, nil
		}
		cancel()
		if r.net.life.Err() != nil {
			break
		}
	}
	return nil, err
}

// askOne asks one resolver once.
func askOne(ctx context.Context, at netip.AddrPort, q query, sent []byte, stream bool) ([]byte, error) {
	network := "udp"
	if stream {
		network = "tcp"
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, at.String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })()
	if stream {
		if err := writeFramed(c, sent); err != nil {
			return nil, err
		}
		answer, err := readFramed(c)
		if err == nil && !q.answered(answer, sent) {
			err = errors.New("answer to another query")
		}
		return answer, err
	}
	if _, err := c.Write(sent); err != nil {
		return nil, err
	}
	buffer := make([]byte, maxDatagram)
	for {
		k, err := c.Read(buffer)
		if err != nil {
			return nil, err
		}
		if q.answered(buffer[:k], sent) {
			return buffer[:k:k], nil
		}
	}
}
