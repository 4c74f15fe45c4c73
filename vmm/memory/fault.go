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
	fault, ok := cause.(memoryFault)
	if !ok || fault.Addr()-m.base >= uintptr(m.size) { // wraps for addresses below
		panic(cause)
	}
	*err = fmt.Errorf("access guest memory (offset %#x): %w", fault.Addr()-m.base, ErrBackingLost)
}

// guard runs fn, which touches guest memory or files that are mapped beside it,
// and turns any fault into an error.
func guard(fn func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		cause := recover()
		if cause == nil {
			return
		}
		fault, ok := cause.(memoryFault)
		if !ok {
			panic(cause)
		}
		err = fmt.Errorf("access memory layers (address %#x): %w", fault.Addr(), ErrBackingLost)
	}()
	return fn()
}

// memoryFault is what the runtime panics with under SetPanicOnFault.
type memoryFault interface {
	runtime.Error
	Addr() uintptr
}
