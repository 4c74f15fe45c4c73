package devices

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Bus maps addresses to the register windows of devices. There is one for
// memory-mapped and one for port accesses. Lookups take no lock, so vCPU
// threads do not meet on it.
type Bus struct {
	// register serialises writers; readers only load windows.
	register sync.Mutex
	// windows is sorted by base. The slice behind the pointer never changes.
	windows atomic.Pointer[[]window]
}

// window is one registered range; last is inclusive, so that a window may end
// at the top of the address space.
type window struct {
	base, last uint64
	handler    Handler
}

// NewBus returns a bus with nobody on it.
func NewBus() *Bus {
	return &Bus{}
}

// Register puts h at the size bytes from base. It is refused when size is 0,
// when the window goes past the end of the address space or when it overlaps
// one that is there. It may be called while lookups are going on.
func (b *Bus) Register(base, size uint64, h Handler) error {
	last := base + size - 1
	if h == nil || size == 0 || last < base {
		return fmt.Errorf("register window (%#x, %#x bytes): not a window", base, size)
	}
	b.register.Lock()
	defer b.register.Unlock()

	old := b.load()
	at, _ := search(old, base)
	// Only the neighbours can overlap: the one that begins at or after base
	// and the one before it.
	for _, i := range []int{at - 1, at} {
		if i < 0 || i >= len(old) {
			continue
		}
		if w := old[i]; base <= w.last && w.base <= last {
			return fmt.Errorf("register window (%#x, %#x bytes): overlaps %#x-%#x", base, size, w.base, w.last)
		}
	}
	windows := slices.Insert(slices.Clone(old), at, window{base: base, last: last, handler: h})
	b.windows.Store(&windows)
	return nil
}

// Read lets the device at addr fill data and reports whether there is one. If
// there is none, or the access does not lie in one window completely, data
// reads as all ones, as a floating bus does.
func (b *Bus) Read(addr uint64, data []byte) bool {
	w, ok := b.find(addr, len(data))
	if !ok {
		for i := range data {
			data[i] = 0xff
		}
		return false
	}
	w.handler.Read(addr-w.base, data)
	return true
}

// Write hands data to the device at addr and reports whether there is one. An
// access that does not lie in one window completely reaches nobody.
func (b *Bus) Write(addr uint64, data []byte) bool {
	w, ok := b.find(addr, len(data))
	if !ok {
		return false
	}
	w.handler.Write(addr-w.base, data)
	return true
}

func (b *Bus) load() []window {
	if p := b.windows.Load(); p != nil {
		return *p
	}
	return nil
}

// find returns the window that holds all n bytes from addr.
func (b *Bus) find(addr uint64, n int) (window, bool) {
	windows := b.load()
	i, exact := search(windows, addr)
	if !exact {
		i--
	}
	if i < 0 || n == 0 {
		return window{}, false
	}
	w := windows[i]
	// Compared as distances, because addr+n may wrap.
	if addr > w.last || uint64(n-1) > w.last-addr {
		return window{}, false
	}
	return w, true
}

// search returns the index of the first window with a base of addr or more and
// whether its base is addr.
func search(windows []window, addr uint64) (int, bool) {
	return slices.BinarySearchFunc(windows, addr, func(w window, a uint64) int {
		switch {
		case w.base < a:
			return -1
		case w.base > a:
			return 1
		}
		return 0
	})
}
