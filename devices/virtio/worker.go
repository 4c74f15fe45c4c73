package virtio

import (
	"fmt"
	"runtime"
	"time"
)

// worker is one run of the goroutine that calls the device's handlers, from a
// Resume to the Pause or Close after it.
type worker struct {
	stop chan struct{} // unbuffered: a stop that is not taken is withdrawn
	done chan struct{}
}

// run serves notifications until it takes a stop.
func (t *Transport) run(w *worker) {
	defer close(w.done)
	for {
		// A stop goes before work that keeps coming.
		if t.preempt.Load() > 0 {
			select {
			case <-w.stop:
				return
			default:
				// Someone waits for the work lock; let it have it.
				runtime.Gosched()
			}
		}
		select {
		case <-w.stop:
			return
		case <-t.wake:
			t.serve()
		}
	}
}

// serve calls the handlers for what is pending now. Work that a handler left
// is pending again afterwards.
func (t *Transport) serve() {
	t.work.Lock()
	defer t.work.Unlock()
	if t.running && t.woken.Swap(false) {
		t.call(t.device.HandleWake)
	}
	pending := t.pending.Swap(0)
	for i := range t.queues {
		if t.running && pending&(1<<i) != 0 {
			t.call(func() error { return t.device.HandleQueue(i) })
		}
	}
}

// call runs one handler and settles what it did to the queues: interrupts for
// chains it gave back, another round for chains it left.
func (t *Transport) call(handler func() error) {
	for _, q := range t.queues {
		q.start()
	}
	err := handler()
	signal := false
	for i, q := range t.queues {
		if q.again {
			t.pending.Or(1 << i)
			t.rouse()
		}
		wanted, e := q.needsInterrupt()
		signal = signal || wanted
		// A device may have passed a queue's error over.
		if err == nil {
			err = q.err
		}
		if err == nil {
			err = e
		}
	}
	if signal {
		t.interrupt(InterruptUsedBuffer)
	}
	if err != nil {
		t.fail(err)
	}
}

// Resume implements devices.Device.
func (t *Transport) Resume() error {
	t.life.Lock()
	defer t.life.Unlock()
	if t.closed.Load() {
		return fmt.Errorf("resume virtio device (%s): closed", t.config.ID)
	}
	if t.worker != nil {
		return nil
	}
	// The guest may not have seen the interrupt for what it was told. One too
	// many does no harm.
	if t.interruptStatus.Load() != 0 {
		if err := t.irq.Trigger(); err != nil {
			return fmt.Errorf("resume virtio device (%s): trigger interrupt: %w", t.config.ID, err)
		}
	}
	t.live.Store(true)
	t.lookAtEverything()
	t.worker = &worker{stop: make(chan struct{}), done: make(chan struct{})}
	go t.run(t.worker)
	return nil
}

// Pause implements devices.Device. It gives up after Config.DrainTimeout if a
// request does not come to its end, and the device goes on then.
func (t *Transport) Pause() error {
	t.life.Lock()
	defer t.life.Unlock()
	timer := time.NewTimer(t.config.DrainTimeout)
	defer timer.Stop()
	if !t.halt(timer.C) {
		return fmt.Errorf("pause virtio device (%s): a request is still in flight after %v", t.config.ID, t.config.DrainTimeout)
	}
	return nil
}

// Close implements devices.Device. It waits for the request in flight, however
// long that takes, and makes later register writes do nothing.
func (t *Transport) Close() error {
	t.life.Lock()
	defer t.life.Unlock()
	t.closed.Store(true)
	t.halt(nil)
	return nil
}

// halt ends the worker and waits for it, or reports false if that could not
// be done before the deadline. life is held.
func (t *Transport) halt(deadline <-chan time.Time) bool {
	if t.worker == nil {
		return true
	}
	t.preempt.Add(1)
	defer t.preempt.Add(-1)
	select {
	case t.worker.stop <- struct{}{}:
	case <-deadline:
		return false
	}
	<-t.worker.done
	t.worker = nil
	t.live.Store(false)
	return true
}
