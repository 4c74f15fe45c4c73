package machine

import (
	"github.com/forkvm/forkvm/devices/balloon"
)

// SetBalloon asks the guest to give up so many bytes of its RAM, or to take back what
// is more. It does not wait for the guest, which does what it can. A reset brings back
// the target that the checkpoint had.
func (m *Machine) SetBalloon(bytes uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.balloon.SetTarget(uint32(min(bytes, m.shape.MemoryBytes) / balloon.PageSize))
	}
}

// Balloon is what a guest has been asked to give back, and has given back. What was
// moved and reported is counted since the machine was made: a clone begins with none.
type Balloon struct {
	Target   uint64 // bytes, see SetBalloon
	Inflated uint64 // bytes put into the balloon
	Deflated uint64 // bytes taken out of it
	Reported uint64 // bytes of free memory that the guest reported by itself
}

// Balloon returns what the guest has given back.
func (m *Machine) Balloon() Balloon {
	s := m.balloon.Stats()
	return Balloon{
		Target:   uint64(s.Target) * balloon.PageSize,
		Inflated: s.Inflated * balloon.PageSize,
		Deflated: s.Deflated * balloon.PageSize,
		Reported: s.Reported,
	}
}
