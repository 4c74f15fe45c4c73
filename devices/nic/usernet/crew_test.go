package usernet

import (
	"sync"
	"testing"

	"github.com/forkvm/forkvm/devices/nic/nictest"
)

// Work runs at once, however much of it there is; few are kept for more, and none behind the end.
func TestCrew(t *testing.T) {
	nictest.CheckLeaks(t)
	var c crew
	c.init()
	end := make(chan struct{})
	for range 3 {
		var all sync.WaitGroup
		const count = 4 * maxIdle
		all.Add(count)
		for range count {
			c.run(func() {
				all.Done()
				all.Wait() // for everybody else
			}, end)
		}
		all.Wait()
	}
	close(end)
	c.wait()
	if c.idle != maxIdle {
		t.Errorf("%d were kept", c.idle)
	}
}
