package proto

import "sync"

// Window is the sending end of a stream's flow control: how many bytes the
// peer is ready to take. One goroutine sends; any may add.
type Window struct {
	mu     sync.Mutex
	ready  sync.Cond // L is &mu
	credit int
	closed bool
}

// NewWindow returns a window without credit.
func NewWindow() *Window {
	w := &Window{}
	w.ready.L = &w.mu
	return w
}

// Wait blocks until there is credit and returns how much, at most limit. It
// returns 0 once the window is closed.
func (w *Window) Wait(limit int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.credit == 0 && !w.closed {
		w.ready.Wait()
	}
	if w.closed {
		return 0
	}
	return min(w.credit, limit)
}

// Use takes n bytes, at most what Wait returned, off the credit.
func (w *Window) Use(n int) {
	w.mu.Lock()
	w.credit -= n
	w.mu.Unlock()
}

// Add gives n more bytes of credit. The error is a *ProtocolError when the
// peer gives more than MaxCredit in total.
func (w *Window) Add(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n < 0 || w.credit+n > MaxCredit {
		return violation("credit above %d bytes", MaxCredit)
	}
	w.credit += n
	w.ready.Broadcast()
	return nil
}

// Close ends the stream: nothing more is wanted, or nobody is there any more.
func (w *Window) Close() {
	w.mu.Lock()
	w.closed = true
	w.ready.Broadcast()
	w.mu.Unlock()
}

// Closed tells whether the stream has been ended by Close.
func (w *Window) Closed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.closed
}

// Queue is the receiving end of a stream: bytes that arrived and were not
// consumed yet, never more than the size it grants. One goroutine pushes, one
// pops.
type Queue struct {
	size int

	mu      sync.Mutex
	ready   sync.Cond // L is &mu
	data    []byte
	granted int // the peer may still send so many
	owed    int // consumed and not granted again yet
	ended   bool
	closed  bool
}

// NewQueue returns a queue of size bytes, all of which are granted: the caller
// tells the peer so with a Credit frame.
func NewQueue(size int) *Queue {
	q := &Queue{size: size, granted: size}
	q.ready.L = &q.mu
	return q
}

// Size returns the credit to announce at the start.
func (q *Queue) Size() int { return q.size }

// Push appends a copy of p. The error is a *ProtocolError when the peer sent
// more than it was granted, or went on after the end.
func (q *Queue) Push(p []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended {
		return violation("data after the end of the stream")
	}
	if len(p) > q.granted {
		return violation("%d bytes of data, %d were granted", len(p), q.granted)
	}
	q.granted -= len(p)
	if !q.closed {
		q.data = append(q.data, p...)
		q.ready.Signal()
	}
	return nil
}

// End marks the end of the stream; what was pushed can still be popped.
func (q *Queue) End() {
	q.mu.Lock()
	q.ended = true
	q.ready.Signal()
	q.mu.Unlock()
}

// Close throws away what is there and what will come.
func (q *Queue) Close() {
	q.mu.Lock()
	q.closed = true
	q.data = nil
	q.ready.Signal()
	q.mu.Unlock()
}

// Pop returns everything that has arrived, waiting until there is something.
// The caller hands back the slice it got before, to be filled again. It
// returns false at the end, and Ended then tells whether that was a clean one.
func (q *Queue) Pop(previous []byte) ([]byte, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.data) == 0 && !q.ended && !q.closed {
		q.ready.Wait()
	}
	if len(q.data) == 0 {
		return nil, false
	}
	p := q.data
	q.data = previous[:0]
	return p, true
}

// Ended tells whether the peer sent all there was and Close was not called.
func (q *Queue) Ended() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended && !q.closed
}

// Consumed returns the credit to announce after n bytes were dealt with, often
// 0: it is saved up to a quarter of the queue, so that small writes do not
// each cost a frame.
func (q *Queue) Consumed(n int) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.owed += n
	if q.owed < q.size/4 || q.ended || q.closed {
		return 0
	}
	n, q.owed = q.owed, 0
	q.granted += n
	return n
}
