package testkit

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// settleTime is how long what a test has closed may take to go: a goroutine between its last statement and its end, a
// descriptor that the runtime closes when its last user returns.
const settleTime = 3 * time.Second

// NoLeaks fails the test when it ends with more open descriptors or goroutines than it had at this call. It is called
// first, before other cleanups are registered. Tests that run in parallel with others cannot use it; for them, Main.
func NoLeaks(t testing.TB) {
	t.Helper()
	before := takeInventory()
	t.Cleanup(func() {
		if t.Failed() || t.Skipped() {
			return // what went wrong first is the news
		}
		for _, leak := range settle(before) {
			t.Errorf("leaked %s", leak)
		}
	})
}

// Main runs the tests of a package and then fails the run when descriptors or goroutines are left. A package with
// either calls it from TestMain:
//
//	func TestMain(m *testing.M) { testkit.Main(m) }
func Main(m *testing.M) {
	heedSignals()
	before := takeInventory()
	code := m.Run()
	if code == 0 {
		if leaks := settle(before); len(leaks) > 0 {
			fmt.Fprintf(os.Stderr, "tests leaked:\n%s\n", strings.Join(leaks, "\n"))
			code = 1
		}
	}
	os.Exit(code)
}

// heedSignals gives the programs that tests start the default dispositions of signals. What a process ignores from its
// start, as below nohup or in a shell's background, its children ignore too, unless it handles the signal itself.
func heedSignals() {
	for _, sig := range []os.Signal{unix.SIGHUP, unix.SIGINT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
}

// inventory is what a process holds.
type inventory struct {
	descriptors map[string]string // number → what it is
	goroutines  map[string]string // id → stack
}

func takeInventory() inventory {
	// The runtime opens descriptors for its poller on first use and keeps them: have them there from the beginning.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	return inventory{openDescriptors(), liveGoroutines()}
}

// settle waits until nothing is held that was not before, and returns what still is when time is up.
func settle(before inventory) []string {
	deadline := time.Now().Add(settleTime)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		leaks := before.added(takeInventory())
		if len(leaks) == 0 || time.Now().After(deadline) {
			return leaks
		}
		runtime.GC() // runs the cleanups of descriptors nobody refers to: those are not the leaks we look for
		time.Sleep(pause)
	}
}

// added describes what now holds and before does not.
func (before inventory) added(now inventory) []string {
	var leaks []string
	for number, what := range now.descriptors {
		if before.descriptors[number] != what {
			leaks = append(leaks, fmt.Sprintf("descriptor %s: %s", number, what))
		}
	}
	for id, stack := range now.goroutines {
		if _, had := before.goroutines[id]; !had {
			leaks = append(leaks, "goroutine "+stack)
		}
	}
	sort.Strings(leaks)
	return leaks
}

// openDescriptors lists this process's descriptors.
func openDescriptors() map[string]string {
	open := make(map[string]string)
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return open
	}
	for _, entry := range entries {
		what, err := os.Readlink(filepath.Join("/proc/self/fd", entry.Name()))
		if err != nil {
			continue // gone: the one that read the directory
		}
		open[entry.Name()] = what
	}
	return open
}

// liveGoroutines returns the stacks of all goroutines but the runtime's and package testing's own, and this one.
func liveGoroutines() map[string]string {
	buf := make([]byte, 64<<10)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	live := make(map[string]string)
	for i, stack := range strings.Split(string(buf), "\n\n") {
		// "goroutine 12 [select]:" starts each; the first is the caller.
		id, _, ok := strings.Cut(strings.TrimPrefix(stack, "goroutine "), " ")
		if i == 0 || !ok || isRuntimeGoroutine(stack) {
			continue
		}
		live[id] = strings.TrimSpace(strings.TrimPrefix(stack, "goroutine "))
	}
	return live
}

// isRuntimeGoroutine knows goroutines that start on first use of something and stay for good.
func isRuntimeGoroutine(stack string) bool {
	for _, mark := range []string{
		"testing.(*T).Run(", "testing.RunTests", "testing.(*M).", "testing.tRunner.func", "os/signal.loop", "os/signal.signal_recv",
		"runtime.ensureSigM", "runtime/trace", "created by runtime", "runtime.gc", "testing.runFuzz",
	} {
		if strings.Contains(stack, mark) {
			return true
		}
	}
	return false
}
