package linux

import (
	"time"

	"golang.org/x/sys/unix"
)

// Monotonic is the time since the host's boot by the clock that the Go runtime
// uses for durations (CLOCK_MONOTONIC). All processes of a host share it, unlike
// the hidden part of a time.Time.
func Monotonic() time.Duration {
	var now unix.Timespec
	// Cannot fail: the clock exists and the pointer is good.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	return time.Duration(now.Nano())
}
