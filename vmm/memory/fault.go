package memory

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// ErrBackingLost says that a page of guest memory cannot be had any more: its
// layer file was truncated, or the storage under it failed. The VM cannot go on.
var ErrBackingLost = errors.New("backing store lost")

// beginAccess makes a fault on guest memory a panic of this goroutine instead of
// the end of the process, until endAccess, which takes the value returned.
func beginAccess() (old bool) { return debug.SetPanicOnFault(true) }

// endAccess is deferred. It turns a fault at an address in guest memory into an
// error, and lets every other panic pass.
func (m *Memory) endAccess(old bool, err *error) {
	debug.SetPanicOnFault(old)
	cause := recover()
	if cause == nil {
		return
	}
	fault, ok := cause.(interface {
		runtime.Error
		Addr() uintptr
	})
	if !ok || fault.Addr()-m.base >= uintptr(m.size) { // wraps for addresses below
		panic(cause)
	}
	*err = fmt.Errorf("access guest memory (offset %#x): %w", fault.Addr()-m.base, ErrBackingLost)
}

// guard runs fn, which touches guest memory, as an access.
func (m *Memory) guard(fn func() error) (err error) {
	defer m.endAccess(beginAccess(), &err)
	return fn()
}
