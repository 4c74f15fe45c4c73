package layer

import (
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A request whose blocks lie in many files would be a system call for each. So a file
// from which short pieces are read again and again is mapped, and they are copied from
// there.
const (
	// windowUnits is the longest piece that is copied, 16 KiB: reading a longer one costs
	// little more for being a call.
	windowUnits = 4
	// windowPieces is how many short pieces are read from a file before it is mapped.
	windowPieces = 16
	// maxWindows is how many files a disk may have for any of them to be mapped:
	// mappings are limited for a process.
	maxWindows = 128
)

// window is a file that may be mapped for reading. The file does not change.
type window struct {
	asked  atomic.Uint32
	mapped atomic.Pointer[[]byte]
}

// bytes returns the mapped file, or nil.
func (w *window) bytes(f *os.File) []byte {
	if b := w.mapped.Load(); b != nil {
		return *b
	}
	if w.asked.Add(1) == windowPieces {
		b := mapFile(f)
		w.mapped.Store(&b)
		return b
	}
	return nil
}

// mapFile returns nil if the file cannot be mapped.
func mapFile(f *os.File) []byte {
	info, err := f.Stat()
	if err != nil || info.Size() == 0 {
		return nil
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return nil
	}
	var b []byte
	if raw.Control(func(fd uintptr) {
		b, err = unix.Mmap(int(fd), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	}) != nil || err != nil {
		return nil
	}
	return b
}

// unmap gives the mapping back. Nobody reads from it any more.
func (w *window) unmap() {
	if b := w.mapped.Swap(nil); b != nil && *b != nil {
		_ = unix.Munmap(*b)
	}
}

// copyAt copies a piece of a file from its window, if it has one.
func (s source) copyAt(p []byte, off int64) bool {
	if s.raw != 0 && off+int64(len(p)) > s.raw {
		return false // zeros follow
	}
	b := s.window.bytes(s.file)
	if off+int64(len(p)) > int64(len(b)) {
		return false
	}
	copy(p, b[off:])
	return true
}

// withoutFaults runs do, which touches mapped files, and reports whether it came to its
// end: a page that cannot be had, because the file was cut short or the storage failed,
// ends it. So does one of the caller's own memory.
func withoutFaults(do func()) (done bool) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if done {
			return
		}
		cause := recover()
		if _, fault := cause.(interface {
			runtime.Error
			Addr() uintptr
		}); !fault {
			panic(cause)
		}
	}()
	do()
	return true
}
