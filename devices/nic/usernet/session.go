package usernet

import (
	"container/list"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// maxDatagram is the largest payload of UDP.
const maxDatagram = 65507

// session is a pair of UDP addresses of the guest and the host's socket that stands for it.
type session struct {
	target  policy.Target
	inbound bool // somebody has sent to a published port: the policy has no say
	guest   *gonet.UDPConn
	server  net.Conn
	last    atomic.Int64 // when a datagram passed, in nanoseconds
	once    sync.Once
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
		oldest.end()
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
	var queue waiter.Queue
	end, failed := request.CreateEndpoint(&queue)
	if failed != nil {
		server.Close()
		return true
	}
	s := &session{target: t, guest: gonet.NewUDPConn(&queue, end), server: server}
	n.udp.add(s, n.rules.Load().Limits().Sessions)
	if !n.start(func() { n.outward(s) }) || !n.start(func() { n.inward(s) }) {
		s.end()
	}
	return true
}

// idle is how long no datagram has passed.
func (s *session) idle() time.Duration { return time.Since(time.Unix(0, s.last.Load())) }

// end closes both sides, for which the two goroutines wait.
func (s *session) end() {
	s.once.Do(func() {
		s.server.Close()
		s.guest.Close()
	})
}

// outward moves datagrams of the guest.
func (n *Net) outward(s *session) {
	defer n.udp.remove(s)
	defer s.end()
	buffer := make([]byte, maxDatagram)
	for {
		k, err := s.guest.Read(buffer)
		if err != nil {
			return
		}
		n.udp.used(s)
		// One that cannot be sent is lost, as datagrams may be.
		if n.pass(&n.meters.sent, k) {
			_, _ = s.server.Write(buffer[:k])
		}
	}
}

// inward moves datagrams for the guest, and ends a session in which none passes either way.
func (n *Net) inward(s *session) {
	defer s.end()
	buffer := make([]byte, maxDatagram)
	for {
		idle := s.idle()
		if idle >= n.config.SessionIdle {
			return
		}
		s.server.SetReadDeadline(time.Now().Add(n.config.SessionIdle - idle))
		k, err := s.server.Read(buffer)
		if timeout, ok := err.(net.Error); ok && timeout.Timeout() {
			continue
		}
		if err != nil {
			return
		}
		n.udp.used(s)
		if n.pass(&n.meters.received, k) {
			_, _ = s.guest.Write(buffer[:k]) // if there is room for it
		}
	}
}
