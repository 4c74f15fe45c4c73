package usernet

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// relay is one TCP connection of the guest and the host's socket that stands for it.
type relay struct {
	target  policy.Target
	flow    nic.Flow
	inbound bool // somebody has come to a published port: the policy has no say
	cancel  context.CancelFunc

	mu      sync.Mutex
	aborted bool
	guest   *gonet.TCPConn // both nil until the connection stands
	end     tcpip.Endpoint
	server  duplex
}

// duplex is a connection whose directions end one by one, as net.TCPConn.
type duplex interface {
	net.Conn
	CloseWrite() error
	SetLinger(seconds int) error
}

// relays are all of a guest.
type relays struct {
	mu   sync.Mutex
	all  map[*relay]struct{}
	life context.Context // until the next Restore
	end  context.CancelFunc
}

func (r *relays) init(parent context.Context) {
	r.all = map[*relay]struct{}{}
	r.life, r.end = context.WithCancel(parent)
}

// each calls do for the connections that stand.
func (r *relays) each(do func(*relay)) {
	r.mu.Lock()
	list := make([]*relay, 0, len(r.all))
	for f := range r.all {
		list = append(list, f)
	}
	r.mu.Unlock()
	for _, f := range list {
		do(f)
	}
}

// reset ends all connections, and all that are being made.
func (r *relays) reset(parent context.Context) {
	r.mu.Lock()
	r.end()
	r.life, r.end = context.WithCancel(parent)
	r.mu.Unlock()
	r.each((*relay).abort)
}

func (r *relays) add(f *relay, limit int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.all) >= limit {
		return false
	}
	r.all[f] = struct{}{}
	return true
}

func (r *relays) remove(f *relay) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, f)
}

func (r *relays) context() (context.Context, context.CancelFunc) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return context.WithCancel(r.life)
}

// connection is called for each SYN of the guest, on a goroutine of its own.
func (n *Net) connection(request *tcp.ForwarderRequest) {
	if !n.start(func() { n.relay(request) }) {
		request.Complete(true)
	}
}

// relay makes a connection and moves its data until both ends have ended. The server is asked first: what it refuses the guest
// is refused, too.
func (n *Net) relay(request *tcp.ForwarderRequest) {
	id := request.ID()
	f := &relay{
		target: policy.Target{Protocol: policy.TCP, Address: fromStack(id.LocalAddress), Port: id.LocalPort},
		flow: nic.Flow{
			Guest:  netip.AddrPortFrom(fromStack(id.RemoteAddress), id.RemotePort),
			Remote: netip.AddrPortFrom(fromStack(id.LocalAddress), id.LocalPort),
		},
	}
	ctx, cancel := n.relays.context()
	defer cancel()
	f.cancel = cancel
	v := n.decide(&f.target)
	if v.Allowed && !n.relays.add(f, n.rules.Load().Limits().Connections) {
		n.refused.note(&f.target, policy.ReasonLimit)
		v.Allowed = false
	}
	if !v.Allowed {
		request.Complete(true)
		return
	}
	defer n.relays.remove(f)
	server, err := n.dial(ctx, f.target)
	if err != nil {
		request.Complete(true)
		return
	}
	defer server.Close()
	var queue waiter.Queue
	end, refused := request.CreateEndpoint(&queue)
	request.Complete(refused != nil)
	if refused != nil {
		return
	}
	guest := gonet.NewTCPConn(&queue, end)
	defer guest.Close()
	if f.stand(guest, end, server.(duplex)) {
		n.move(ctx, f, v.ByName)
	}
}

// stand notes both ends, unless the connection has been ended meanwhile.
func (f *relay) stand(guest *gonet.TCPConn, end tcpip.Endpoint, server duplex) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.aborted {
		end.Abort()
		return false
	}
	f.guest, f.end, f.server = guest, end, server
	if f.inbound {
		f.flow = nic.Flow{Guest: at(guest.RemoteAddr()), Remote: at(guest.LocalAddr())}
	}
	return true
}

// at is an address of the stack's.
func at(a net.Addr) netip.AddrPort {
	t := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(t.Addr().Unmap(), t.Port())
}

// known returns the connection's two ends, if they are known already.
func (f *relay) known() (nic.Flow, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.flow, f.flow.Guest.IsValid()
}

// abort ends the connection at both ends with a reset.
func (f *relay) abort() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.aborted = true
	f.cancel()
	if f.server != nil {
		f.server.SetLinger(0)
		f.server.Close()
		f.end.Abort()
	}
}

// move copies both ways until both have ended, or one with an error.
func (n *Net) move(ctx context.Context, f *relay, byName bool) {
	fromServer := meteredReader{f.server, ctx, n, &n.meters.received}
	fromGuest := meteredReader{f.guest, ctx, n, &n.meters.sent}
	done := make(chan struct{})
	if !n.start(func() {
		defer close(done)
		err := n.copy(f.guest, fromServer)
		f.half(err, f.guest.CloseWrite)
	}) {
		f.abort()
		return
	}
	first, err := n.opening(f, byName)
	if err == nil && len(first) > 0 {
		n.meters.sent.add(len(first), 0)
		_, err = f.server.Write(first)
	}
	if err == nil {
		err = n.copy(f.server, fromGuest)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	f.half(err, f.server.CloseWrite)
	<-done
}

// copyBuffer is how much of a connection is moved at a time, in bytes.
const copyBuffer = 32 << 10

// copy moves what a reader has. Most connections are short, and a buffer of its own for each would be most of what they cost the
// process's memory: buffers are used again.
func (n *Net) copy(to io.Writer, from io.Reader) error {
	buffer, ok := n.buffers.Get().(*[copyBuffer]byte)
	if !ok {
		buffer = new([copyBuffer]byte)
	}
	defer n.buffers.Put(buffer)
	// Nothing but Write: a socket's ReadFrom would make a buffer of its own.
	_, err := io.CopyBuffer(struct{ io.Writer }{to}, from, buffer[:])
	return err
}

// half ends one direction: politely, or after an error both at once.
func (f *relay) half(err error, closeWrite func() error) {
	if err != nil || closeWrite() != nil {
		f.abort()
	}
}

const (
	maxOpening = 16 << 10
	// openingTimeout is how long a client that must name its server may take.
	openingTimeout = 30 * time.Second
)

var errWrongName = errors.New("client asks for a name that is not allowed")

// opening reads what the client says first, if only a name leads to the server, and refuses a client that asks for another
// name. A client of a protocol that names no server gets through: the address is one of an allowed name.
func (n *Net) opening(f *relay, byName bool) ([]byte, error) {
	if !byName {
		return nil, nil
	}
	buffer := make([]byte, 0, 2048)
	for {
		name, s := serverName(buffer)
		switch {
		case s == namesServer && n.rules.Load().Serves(f.target, name):
			return buffer, nil
		case s == namesServer, s == namesNobody, s == undecided && len(buffer) >= maxOpening:
			t := f.target
			t.Names = []string{name}
			n.refused.note(&t, policy.ReasonWrongName)
			return nil, errWrongName
		case s == otherProtocol:
			return buffer, nil
		}
		if len(buffer) == cap(buffer) {
			buffer = append(buffer, make([]byte, len(buffer))...)[:len(buffer)]
		}
		if len(buffer) > 0 { // it has begun
			f.guest.SetReadDeadline(time.Now().Add(openingTimeout))
		}
		k, err := f.guest.Read(buffer[len(buffer):cap(buffer)])
		buffer = buffer[:len(buffer)+k]
		if err != nil && k == 0 {
			return buffer, err
		}
		f.guest.SetReadDeadline(time.Time{})
	}
}
