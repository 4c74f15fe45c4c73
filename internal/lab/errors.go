package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// MissingError says that this machine lacks a program that the lab needs.
type MissingError struct{ Program string }

// debianPackages are the packages of the programs that the lab runs or takes along.
var debianPackages = map[string]string{
	emulatorName: "qemu-system-x86", "busybox": "busybox-static", "mke2fs": "e2fsprogs", "e2fsck": "e2fsprogs",
	"debugfs": "e2fsprogs", "dumpe2fs": "e2fsprogs", "tune2fs": "e2fsprogs", "resize2fs": "e2fsprogs",
	"apt-get": "apt", "apt-cache": "apt",
}

func (e *MissingError) Error() string {
	text := fmt.Sprintf("find program %s: not on this machine", e.Program)
	if name := debianPackages[e.Program]; name != "" {
		text += "; install it with: apt-get install " + name
	}
	return text
}

// Reason says why a machine is no more.
type Reason string

const (
	// Panic: the machine's kernel gave up.
	Panic Reason = "kernel panic"
	// Exited: the emulator or the machine ended by itself.
	Exited Reason = "machine ended"
	// TimedOut: the machine did not answer in its time.
	TimedOut Reason = "timed out"
	// Cancelled: the caller's context ended before the machine answered.
	Cancelled Reason = "cancelled"
	// Closed: Close was called while a command ran.
	Closed Reason = "closed"
)

// DeathError is the end of a lab machine before its time.
type DeathError struct {
	Reason   Reason
	Doing    string // what was going on, such as "boot" or the command
	Emulator string // what the emulator said and how it ended; may be empty
	Console  []string
	Cause    error // may be nil
}

func (e *DeathError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "run lab machine (%s): %s", e.Doing, e.Reason)
	if e.Cause != nil && e.Reason != TimedOut && e.Reason != Cancelled { // those say it all
		fmt.Fprintf(&b, ": %v", e.Cause)
	}
	if e.Emulator != "" {
		fmt.Fprintf(&b, "\n%s", e.Emulator)
	}
	if len(e.Console) > 0 {
		fmt.Fprintf(&b, "\nlast lines of the machine's console:\n  %s", strings.Join(e.Console, "\n  "))
	}
	return b.String()
}

func (e *DeathError) Unwrap() error { return e.Cause }

// StoppedError says that a command was killed because its context ended. The machine goes on.
type StoppedError struct {
	Doing string // the command
	Cause error  // context.DeadlineExceeded or context.Canceled
}

func (e *StoppedError) Error() string {
	if errors.Is(e.Cause, context.DeadlineExceeded) {
		return fmt.Sprintf("run in lab (%s): killed, its time ran out", e.Doing)
	}
	return fmt.Sprintf("run in lab (%s): killed: %v", e.Doing, e.Cause)
}

func (e *StoppedError) Unwrap() error { return e.Cause }
