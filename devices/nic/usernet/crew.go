package usernet

import "sync"

// maxIdle is how many goroutines are kept for later.
const maxIdle = 8

// crew runs work on goroutines, some of which it uses again. A new one begins with a small stack, which is copied each time that it
// grows: in the depths of a network stack, time after time. In the life of a short connection that was the largest single cost.
type crew struct {
	all  sync.WaitGroup
	work chan func() // taken only by those who are idle

	mu   sync.Mutex
	idle int
}

func (c *crew) init() { c.work = make(chan func()) }

// run does not wait for the work. Who is idle leaves when the end has come. It may not be called after wait.
func (c *crew) run(work func(), end <-chan struct{}) {
	select {
	case c.work <- work:
	default:
		c.all.Go(func() { c.serve(work, end) })
	}
}

func (c *crew) serve(work func(), end <-chan struct{}) {
	for {
		work()
		if !c.rest(1) {
			return
		}
		select {
		case work = <-c.work:
			c.rest(-1)
		case <-end:
			return
		}
	}
}

// rest counts who is idle, unless there are enough.
func (c *crew) rest(change int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle+change > maxIdle {
		return false
	}
	c.idle += change
	return true
}

// wait returns when all work is done and the end has come.
func (c *crew) wait() { c.all.Wait() }
