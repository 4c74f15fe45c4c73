package agent

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// exitStatus is how a process ended.
type exitStatus struct {
	code   int // exit code, or 0 after a signal
	signal int // signal number, or 0
	at     time.Time
}

func toExit(ws syscall.WaitStatus) exitStatus {
	e := exitStatus{at: time.Now()}
	if ws.Signaled() {
		e.signal = int(ws.Signal())
	} else {
		e.code = ws.ExitStatus()
	}
	return e
}

// reaper is the only place that waits for processes. As PID 1 it has to wait
// for any child, and a second waiter would then lose exit codes to it.
type reaper struct {
	init bool
	sig  chan os.Signal
	quit chan struct{}
	done chan struct{}

	// mu is held from before a process is started until it is registered, and
	// while children are reaped: a process that ends at once is not missed, and
	// a pid found in waiting is not the pid of somebody else.
	mu      sync.Mutex
	waiting map[int]chan exitStatus
}

func newReaper(init bool) *reaper {
	r := &reaper{
		init:    init,
		sig:     make(chan os.Signal, 1),
		quit:    make(chan struct{}),
		done:    make(chan struct{}),
		waiting: map[int]chan exitStatus{},
	}
	signal.Notify(r.sig, syscall.SIGCHLD)
	go r.loop()
	return r
}

func (r *reaper) close() {
	signal.Stop(r.sig)
	close(r.quit)
	<-r.done
}

func (r *reaper) loop() {
	defer close(r.done)
	for {
		select {
		case <-r.sig:
			r.reap()
		case <-r.quit:
			return
		}
	}
}

// reap collects every child that has ended. One SIGCHLD can stand for many.
func (r *reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.init {
		for pid := range r.waiting {
			r.collect(pid)
		}
		return
	}
	for r.collect(-1) {
	}
}

// collect waits for pid, or for any child if it is -1, without blocking, and
// tells whether there was one. mu is held.
func (r *reaper) collect(pid int) bool {
	var ws syscall.WaitStatus
	got, err := wait4(pid, &ws, syscall.WNOHANG)
	if err != nil || got == 0 {
		return false
	}
	if !ws.Exited() && !ws.Signaled() {
		return true
	}
	r.deliver(got, toExit(ws))
	return true
}

// deliver hands an exit to whoever waits for it. mu is held.
func (r *reaper) deliver(pid int, e exitStatus) {
	if c, ok := r.waiting[pid]; ok {
		delete(r.waiting, pid)
		c <- e
	}
}

// start runs fn, which starts a process, and returns a channel that receives
// its end. fn may report a process that has ended and was waited for already.
func (r *reaper) start(fn func() (pid int, ended *exitStatus, err error)) (int, <-chan exitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, ended, err := fn()
	if err != nil {
		return 0, nil, err
	}
	c := make(chan exitStatus, 1)
	r.waiting[pid] = c
	if ended != nil {
		r.deliver(pid, *ended)
	}
	return pid, c, nil
}

// signal sends a signal to a process group while its leader has not been
// reaped, so that the number still belongs to it.
func (r *reaper) signal(pid int, s syscall.Signal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.waiting[pid]; ok {
		syscall.Kill(-pid, s)
	}
}

// wait4 is syscall.Wait4 that goes on after a signal to ourselves.
func wait4(pid int, ws *syscall.WaitStatus, options int) (int, error) {
	for {
		got, err := syscall.Wait4(pid, ws, options, nil)
		if err != syscall.EINTR {
			return got, err
		}
	}
}
