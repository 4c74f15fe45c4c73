package usernet

import (
	"container/list"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// session is a pair of UDP addresses of the guest and the host's socket that stands for it.
type session struct {
	target  policy.Target
	inbound bool // somebody has sent to a published port: the policy has no say
	guest   *gonet.UDPConn
	end     tcpip.Endpoint // guest's
	arrival waiter.Entry   // of a datagram there
	server  net.Conn       // nil if the socket is not its own
	out     outlet
	last    atomic.Int64 // when a datagram passed, in nanoseconds
	once    sync.Once
	ended   func()
}

// sessions are all of a guest, the one that was made or used longest ago first.
type sessions struct {
	mu    sync.Mutex
	order *list.List
	place map[*session]*list.Element
}

func (s *sessions) init() { s.order, s.place = list.New(), map[*session]*list.Element{} }

// add takes a session in, as the latest of no more than the limit.
func (s *sessions) add(one *session, limit int) {
	s.shrink(limit - 1)
	s.mu.Lock()
	s.place[one] = s.order.PushBack(one)
	s.mu.Unlock()
	s.used(one)
}

// shrink ends those that were idle longest until there are no more than the limit.
func (s *sessions) shrink(limit int) {
	for {
		s.mu.Lock()
		if s.order.Len() <= limit {
			s.mu.Unlock()
			return
		}
		oldest := s.order.Remove(s.order.Front()).(*session)
		delete(s.place, oldest)
		s.mu.Unlock()
		oldest.close()
	}
}

func (s *sessions) remove(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.place[one]; e != nil {
		s.order.Remove(e)
		delete(s.place, one)
	}
}

// used makes a session the latest.
func (s *sessions) used(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.place[one]; e != nil {
		s.order.MoveToBack(e)
	}
	one.last.Store(time.Now().UnixNano())
}

func (s *sessions) each(do func(*session)) {
	s.mu.Lock()
	all := make([]*session, 0, len(s.place))
	for one := range s.place {
		all = append(all, one)
	}
	s.mu.Unlock()
	for _, one := range all {
		do(one)
	}
}

func (s *sessions) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.order.Len()
}

// datagram is called for the first datagram of a pair of addresses. For one that is refused the stack sends an ICMP error.
func (n *Net) datagram(request *udp.ForwarderRequest) bool {
	id := request.ID()
	t := policy.Target{Protocol: policy.UDP, Address: fromStack(id.LocalAddress), Port: id.LocalPort}
	if !n.decide(&t).Allowed {
		return false
	}
	server, err := n.dial(n.life, t) // waits for nobody
	if err != nil {
		return false
	}
	out, err := newOutlet(server, nil)
	if err != nil {
		server.Close()
		return false
	}
	var queue waiter.Queue
	end, failed := request.CreateEndpoint(&queue)
	if failed != nil {
		server.Close()
		return true
	}
	s := &session{target: t, guest: gonet.NewUDPConn(&queue, end), end: end, server: server, out: out}
	s.ended = func() { n.udp.remove(s) }
	n.udp.add(s, n.rules.Load().Limits().Sessions)
	if !n.start(func() { n.inward(s) }) {
		s.close()
		return true
	}
	n.listen(s, &queue)
	return true
}

// idle is how long no datagram has passed.
func (s *session) idle() time.Duration { return time.Since(time.Unix(0, s.last.Load())) }

// close closes both sides.
func (s *session) close() {
	s.once.Do(func() {
		if s.server != nil {
			s.server.Close()
		}
		s.guest.Close()
		s.ended()
	})
}

// listen has datagrams of the guest sent on as they come, the first of which is there.
func (n *Net) listen(s *session, queue *waiter.Queue) {
	s.arrival = waiter.NewFunctionEntry(waiter.ReadableEvents, func(waiter.EventMask) { n.outward(s) })
	queue.EventRegister(&s.arrival)
	n.outward(s)
}

// outward moves datagrams of the guest. Whoever brings one does it, which is as a rule the card: another goroutine would cost more than
// all the rest.
func (n *Net) outward(s *session) {
	buffer := n.datagrams.get()
	defer n.datagrams.put(buffer)
	for {
		w := tcpip.SliceWriter(buffer[:])
		read, err := s.end.Read(&w, tcpip.ReadOptions{})
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			return
		default:
			n.start(s.close) // not here, where the stack may hold what that needs
			return
		}
		n.udp.used(s)
		if n.pass(&n.meters.sent, read.Count) {
			s.out.send(buffer[:read.Count])
		}
	}
}

// inward moves datagrams for the guest, and ends a session in which none passes either way.
func (n *Net) inward(s *session) {
	defer s.close()
	s.server.SetReadDeadline(time.Now().Add(n.config.SessionIdle))
	for {
		err := n.takeDatagram(s)
		if timeout, ok := err.(net.Error); ok && timeout.Timeout() {
			idle := s.idle()
			if idle >= n.config.SessionIdle {
				return
			}
			s.server.SetReadDeadline(time.Now().Add(n.config.SessionIdle - idle))
		} else if err != nil {
			return
		}
	}
}

// takeDatagram waits for a datagram and gives it to the guest, if there is room for it. Who waits has no buffer.
func (n *Net) takeDatagram(s *session) error {
	var buffer *datagramBuffer
	var size int
	var failed error
	err := s.out.raw.Read(func(fd uintptr) bool {
		buffer = n.datagrams.get()
		size, failed = unix.Read(int(fd), buffer[:])
		if failed == unix.EAGAIN {
			n.datagrams.put(buffer)
			buffer = nil
		}
		return failed != unix.EAGAIN
	})
	if buffer == nil {
		return err
	}
	defer n.datagrams.put(buffer)
	if failed != nil {
		return failed
	}
	n.udp.used(s)
	if n.pass(&n.meters.received, size) {
		_, _ = s.guest.Write(buffer[:size])
	}
	return nil
}
