// Package linux wraps the Linux system calls that more than one package needs
// and that the os and net packages do not offer in a typed form: sealed memory
// files, fixed mappings, the page-map scan, event descriptors, process handles,
// descriptor passing, unnamed files and sparse-file operations.
//
// The wrappers carry no policy. Errors read "verb object (id): cause" and wrap
// the errno, so errors.Is(err, unix.ENOSPC) and the like work. EINTR is retried
// where repeating the call is harmless, which is said at the function.
package linux

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// ignoringEINTR repeats call until it ends with something other than EINTR.
// Only for calls that have no effect when they are interrupted.
func ignoringEINTR(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// descriptor returns f's number without what os.File.Fd does besides: taking
// the descriptor out of non-blocking mode. The caller keeps f alive and open.
func descriptor(f *os.File) (int, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	number := -1
	err = raw.Control(func(fd uintptr) { number = int(fd) })
	return number, err
}
