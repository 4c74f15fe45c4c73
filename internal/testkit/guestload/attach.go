package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// attach traces every process that begins after it and stops it for good, except
// those that its own were: what a program with root's rights can do to others.
func attach([]string) error {
	// A tracer is a thread.
	runtime.LockOSThread()
	seen := map[string]bool{}
	for first := true; ; first = false {
		dirs, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return err
		}
		for _, dir := range dirs {
			if seen[dir] {
				continue
			}
			seen[dir] = true
			pid, _ := strconv.Atoi(filepath.Base(dir))
			if !first && pid != os.Getpid() {
				_ = unix.PtraceAttach(pid) // it may be gone
			}
		}
		time.Sleep(time.Millisecond)
	}
}
