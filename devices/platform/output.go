package platform

import (
	"errors"
	"io"
	"sync"
	"time"
)

// OutputBuffer is how many bytes of console output wait for a slow writer. With the chunk that is being written, twice
// as much may be held.
const OutputBuffer = 64 << 10

// closeTimeout is how long Close waits for a writer that blocks. A variable for tests.
var closeTimeout = 2 * time.Second

// ErrOutputBlocked is the reason when Close gave up on a console writer that does not return.
var ErrOutputBlocked = errors.New("console output blocks")

// output carries bytes from a vCPU thread, which must not wait, to a writer, which may.
type output struct {
	writer io.Writer
	wake   chan struct{}
	done   chan struct{}

	mu      sync.Mutex
	pending []byte
	dropped uint64
	failure error
	closing bool
}

func newOutput(w io.Writer) *output {
	o := &output{writer: w, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go o.run()
	return o
}

// put queues one byte. When the queue is full the oldest byte goes: what a guest said last says why it died.
func (o *output) put(value byte) {
	o.mu.Lock()
	if len(o.pending) >= OutputBuffer {
		o.pending = o.pending[1:]
		o.dropped++
	}
	o.pending = append(o.pending, value)
	first := len(o.pending) == 1
	o.mu.Unlock()
	if first {
		o.signal()
	}
}

func (o *output) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *output) run() {
	defer close(o.done)
	for {
		chunk, closing := o.take()
		if len(chunk) == 0 {
			if closing {
				return
			}
			<-o.wake
			continue
		}
		n, err := o.writer.Write(chunk)
		if err != nil || n < len(chunk) {
			o.fail(len(chunk)-max(0, min(n, len(chunk))), err)
		}
	}
}

func (o *output) take() (chunk []byte, closing bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	chunk, o.pending = o.pending, nil
	return chunk, o.closing
}

// fail counts what a full disk or a closed pipe swallowed. The guest is not to notice, and the next chunk is tried again.
func (o *output) fail(lost int, err error) {
	if err == nil {
		err = io.ErrShortWrite
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropped += uint64(lost)
	o.failure = err
}

func (o *output) lost() (uint64, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.dropped, o.failure
}

// close writes what is left and ends the goroutine. A writer with deadlines (a pipe, a socket) is interrupted if it
// blocks; any other one keeps its goroutine until its Write returns.
func (o *output) close() error {
	o.mu.Lock()
	o.closing = true
	o.mu.Unlock()
	o.signal()
	if o.wait(closeTimeout) {
		return nil
	}
	if w, ok := o.writer.(interface{ SetWriteDeadline(time.Time) error }); ok && w.SetWriteDeadline(time.Now()) == nil {
		<-o.done
		_ = w.SetWriteDeadline(time.Time{})
	}
	return ErrOutputBlocked
}

func (o *output) wait(timeout time.Duration) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-o.done:
		return true
	case <-timer.C:
		return false
	}
}
