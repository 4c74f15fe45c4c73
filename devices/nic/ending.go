package nic

import (
	"slices"
	"sync"
	"time"
)

// probePauses are the times between the probes of a connection. A guest's kernel answers one segment that is out of order on a
// connection in each half second (in Linux net.ipv4.tcp_invalid_ratelimit), and in a busy guest that may have been another one.
var probePauses = []time.Duration{600 * time.Millisecond, time.Second}

// Ending has the connections of a guest end that it has brought from another life. Its methods may be called from any goroutine;
// they call the function that it was made with, and no other way round.
type Ending struct {
	card MAC
	send func(frames [][]byte)

	mu    sync.Mutex // guards what follows, and is held while send is called
	flows []Flow
	next  *time.Timer // the round of probes after this one; nil before the first
}

// NewEnding returns one for the guest with this card, which gets the frames of each round by send.
func NewEnding(card MAC, send func(frames [][]byte)) *Ending { return &Ending{card: card, send: send} }

// Set says which connections these are. What there was of the life before is forgotten.
func (e *Ending) Set(flows []Flow) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.setLocked(flows)
}

func (e *Ending) setLocked(flows []Flow) {
	if e.next != nil {
		e.next.Stop()
		e.next = nil
	}
	e.flows = flows
}

// Flows are the connections that may not have ended yet.
func (e *Ending) Flows() []Flow {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.flows)
}

// Begin is called when the guest has its own addresses. A connection that has ended, or a new one in its place, takes no harm
// from a probe.
func (e *Ending) Begin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.next == nil {
		e.probeLocked(probePauses)
	}
}

// probeLocked sends a round of probes, and has further ones follow after these pauses.
func (e *Ending) probeLocked(pauses []time.Duration) {
	if len(e.flows) == 0 {
		return
	}
	frames := make([][]byte, len(e.flows))
	for i, f := range e.flows {
		frames[i] = f.Probe(e.card)
	}
	e.send(frames)
	if len(pauses) == 0 {
		e.setLocked(nil)
		return
	}
	// A timer that was stopped too late finds that it is not the next one any more.
	var timer *time.Timer
	timer = time.AfterFunc(pauses[0], func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.next == timer {
			e.probeLocked(pauses[1:])
		}
	})
	e.next = timer
}
