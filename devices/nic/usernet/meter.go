package usernet

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// burst is how far a guest that was silent may be ahead of its rate.
const burst = 100 * time.Millisecond

var errLimit = errors.New("guest has had all bytes that it may have")

// meter counts the bytes or packets that pass one way, and holds them back to a rate.
type meter struct {
	passed atomic.Uint64
	mu     sync.Mutex
	next   time.Time // when the next one may pass
}

// add counts some and returns how long they have to wait, at a rate of so many a second; 0 is none.
func (m *meter) add(n int, rate uint64) time.Duration {
	m.passed.Add(uint64(n))
	if rate == 0 {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if earliest := now.Add(-burst); m.next.Before(earliest) {
		m.next = earliest
	}
	m.next = m.next.Add(time.Duration(float64(n) / float64(rate) * float64(time.Second)))
	return m.next.Sub(now)
}

// late says whether more has passed than the rate allows.
func (m *meter) late(rate uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return rate != 0 && time.Until(m.next) > burst
}

// meters are those of both ways, of bytes that connections and datagrams carry and of packets on the link.
type meters struct{ sent, received, packetsSent, packetsReceived meter }

// spent says whether the guest has had all that it may have.
func (m *meters) spent(l policy.Limits) bool {
	return l.Bytes != 0 && m.sent.passed.Load()+m.received.passed.Load() >= l.Bytes
}

// meteredReader passes on what a meter lets pass.
type meteredReader struct {
	io.Reader
	ctx   context.Context
	net   *Net
	meter *meter
}

func (r meteredReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n == 0 {
		return n, err
	}
	limits := r.net.rules.Load().Limits()
	if r.net.meters.spent(limits) {
		return 0, errLimit
	}
	if wait := r.meter.add(n, limits.Rate); wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-r.ctx.Done():
			return 0, r.ctx.Err()
		}
	}
	return n, err
}

// pass counts a datagram, and says whether it may pass: one that is too many is lost.
func (n *Net) pass(m *meter, size int) bool {
	limits := n.rules.Load().Limits()
	if n.meters.spent(limits) || m.late(limits.Rate) {
		return false
	}
	m.add(size, limits.Rate)
	return true
}

// keepsPace counts packets on the link, and says whether they may pass: those that are too many are lost.
func (n *Net) keepsPace(m *meter, packets int) bool {
	rate := n.rules.Load().Limits().Packets
	switch {
	case rate == 0:
		return true
	case m.late(rate):
		n.filter.counts[ClassExcess].Add(1)
		return false
	}
	m.add(packets, rate)
	return true
}
