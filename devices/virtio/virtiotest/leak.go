package virtiotest

import (
	"os"
	"runtime"
	"testing"
	"time"
)

// CheckLeaks lets the test fail if it ends with more goroutines or open files
// than it has now. It is called before anything else in a test, so that the
// look back comes after all other cleanups.
func CheckLeaks(tb testing.TB) {
	tb.Helper()
	goroutines, files := runtime.NumGoroutine(), openFiles(tb)
	tb.Cleanup(func() {
		var now int
		// Goroutines that have said that they are done may need a moment.
		for range 200 {
			if now = runtime.NumGoroutine(); now <= goroutines {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		if now > goroutines {
			stacks := make([]byte, 1<<16)
			tb.Errorf("%d goroutines, %d before:\n%s", now, goroutines, stacks[:runtime.Stack(stacks, true)])
		}
		if now := openFiles(tb); now > files {
			tb.Errorf("%d open files, %d before", now, files)
		}
	})
}

func openFiles(tb testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(entries)
}
