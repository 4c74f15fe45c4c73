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

// meter counts the bytes that pass one way, and holds them back to a rate.
type meter struct {
	bytes atomic.Uint64
	mu    sync.Mutex
	next  time.Time // when the next byte may pass
}

// add counts bytes and returns how long they have to wait, at a rate of bytes a second; 0 is none.
func (m *meter) add(n int, rate uint64) time.Duration {
	m.bytes.Add(uint64(n))
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

// meters are those of both ways.
type meters struct{ sent, received meter }

// spent says whether the guest has had all that it may have.
func (m *meters) spent(l policy.Limits) bool {
	return l.Bytes != 0 && m.sent.bytes.Load()+m.received.bytes.Load() >= l.Bytes
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
