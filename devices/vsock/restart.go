package vsock

import (
	"encoding/binary"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
)

// restartTimeout is how long new connections wait for the driver to handle the announced reset, in time that the device
// runs. A driver that takes longer may close them; one that never answers must not hold them for ever. A variable for tests.
var restartTimeout = 3 * time.Second

// bufferTimeout is how long the announcement waits for a buffer of the driver.
const bufferTimeout = 100 * time.Millisecond

// restart is what a restored device has to do before it is as good as new (section 5.10.6.7): tell the
// driver that the other ends of its connections are gone. A plain pause and resume has no part in it.
type restart struct {
	stage restartStage
	// connections are those of the saved device.
	connections []portPair
	// unhandled counts the announced resets that the driver has not been seen to handle, those before the saved state
	// included.
	unhandled int
	// available is how many event buffers the driver had offered after the announcement.
	available int
	timer     *time.Timer
	deadline  time.Time // of timer
}

type restartStage int

const (
	restartNone     restartStage = iota
	restartSaved                 // state is there, the driver's queues are not
	restartAnnounce              // the event is due
	restartWait                  // the driver has the event, and data has to wait
)

// holding reports whether packets to the guest have to wait.
func (s *restart) holding() bool { return s.stage == restartAnnounce || s.stage == restartWait }

// activate begins the announcement when the queues are there.
func (s *restart) activate() {
	if s.stage != restartSaved {
		return
	}
	s.stage = restartAnnounce
}

// serve goes on with the announcement. It is called for the event queue and whenever the worker wakes. fired: the timer ran
// out, or one that was stopped too late.
func (s *restart) serve(r *router, fired bool) error {
	queue := r.queues[queueEvent]
	if s.stage == restartAnnounce {
		if err := s.announce(r, queue); err != nil {
			return err
		}
	}
	switch {
	case !s.holding():
		return nil
	case fired && !s.deadline.IsZero() && !time.Now().Before(s.deadline):
		// If there was no buffer for the event, the resets of the old connections have to do: later it would only hit new ones.
		s.done(r)
		return nil
	case s.stage == restartAnnounce:
		s.startTimer(r, bufferTimeout)
		return nil
	}
	now, err := countAvailable(queue)
	if err != nil {
		return err
	}
	// A driver gives an event's buffer back after it has acted on the event.
	if now-s.available >= s.unhandled {
		s.unhandled = 0
		s.done(r)
		return nil
	}
	s.startTimer(r, restartTimeout)
	return nil
}

// announce sends the event if there is a buffer for it.
func (s *restart) announce(r *router, queue *virtio.Queue) error {
	chain, err := queue.Pop()
	if err != nil {
		return err
	}
	if chain == nil {
		return nil
	}
	if chain.WritableLen() < eventSize {
		s.done(r)
		return queue.Push(chain, 0)
	}
	if err := chain.WriteAt(binary.LittleEndian.AppendUint32(nil, eventTransportReset), 0); err != nil {
		return pushFailed(queue, chain, err)
	}
	if err := queue.Push(chain, eventSize); err != nil {
		return err
	}
	s.stage = restartWait
	s.stopTimer()
	s.unhandled++
	s.available, err = countAvailable(queue)
	return err
}

// done lets packets through, first of all a reset for each old connection. That is for those that the announcement did not
// reach: Linux does not count one that is being made as connected. It comes after the announcement because a program would
// take it for an orderly end of file.
func (s *restart) done(r *router) {
	s.stage = restartNone
	resets := make([]header, 0, len(s.connections)+len(r.replies))
	for _, p := range s.connections {
		resets = append(resets, r.resetFor(p))
	}
	r.replies = append(resets, r.replies...)
	s.connections = nil
	s.stopTimer()
}

func (s *restart) startTimer(r *router, d time.Duration) {
	if s.timer == nil {
		s.deadline = time.Now().Add(d)
		s.timer = time.AfterFunc(d, func() { r.noteTimer(&r.timers.restart) })
	}
}

func (s *restart) stopTimer() {
	if s.timer != nil {
		s.timer.Stop()
		s.timer, s.deadline = nil, time.Time{}
	}
}

// countAvailable returns how many buffers the driver offers, by taking all and putting them back. There are at most
// eventQueueSize. When a pause holds some back the count is too low, and the worker calls again.
func countAvailable(queue *virtio.Queue) (int, error) {
	var chains []*virtio.Chain
	var err error
	for {
		var chain *virtio.Chain
		if chain, err = queue.Pop(); chain == nil || err != nil {
			break
		}
		chains = append(chains, chain)
	}
	for i := len(chains) - 1; i >= 0; i-- {
		queue.Undo(chains[i])
	}
	return len(chains), err
}
