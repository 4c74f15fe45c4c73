package cli

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
)

// spin does something that takes a while and shows that it goes on, where
// somebody looks.
func (a *app) spin(what string, do func() error) error {
	if !a.showsProgress() {
		return do()
	}
	begun := time.Now()
	stop := a.drawing(func(frame int) string {
		const spinner = `|/-\`
		return fmt.Sprintf("%c %s %v", spinner[frame%len(spinner)], what, time.Since(begun).Round(time.Second))
	})
	defer stop()
	return do()
}

// measure does something about a number of bytes, which says how far it is, and
// shows that where somebody looks.
func (a *app) measure(what string, total int64, do func(advance func(bytes int64)) error) error {
	if !a.showsProgress() || total == 0 {
		return do(func(int64) {})
	}
	var done atomic.Int64
	stop := a.drawing(func(int) string {
		n := min(done.Load(), total)
		return fmt.Sprintf("%s %3d %% of %s", what, n*100/total, output.Size(total))
	})
	defer stop()
	return do(func(bytes int64) { done.Add(bytes) })
}

// frameInterval is how often progress is drawn: as a person can still read it.
const frameInterval = 120 * time.Millisecond

// drawing writes a line to standard error again and again, over itself, until what
// it returns is called, which removes the line.
func (a *app) drawing(line func(frame int) string) (stop func()) {
	const restart, erase = "\r", "\x1b[K"
	end := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(frameInterval)
		defer tick.Stop()
		for frame := 0; ; frame++ {
			fmt.Fprint(a.Stderr, restart, line(frame), erase)
			select {
			case <-end:
				fmt.Fprint(a.Stderr, restart, erase)
				return
			case <-tick.C:
			}
		}
	})
	return func() {
		close(end)
		done.Wait()
	}
}

// showsProgress: on a terminal, unless it is unwanted or nobody is there.
func (a *app) showsProgress() bool {
	return a.StderrTerminal && !a.quiet && a.User.Getenv("NO_COLOR") == "" && a.User.Getenv("CI") == ""
}
