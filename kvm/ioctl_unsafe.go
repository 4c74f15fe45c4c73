package kvm

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl goes through unix.Syscall, not RawSyscall: the scheduler must know
// that the thread is away, KVM_RUN above all.
func ioctl(fd int, nr, arg uintptr) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), nr, arg)
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// pointer does an ioctl whose argument points to one structure of the
// kernel's. The conversion is part of the call, so arg stays alive and in
// place until the kernel is done with it.
func pointer[T any](h *handle, nr uintptr, arg *T) (int, error) {
	fd, err := h.acquire()
	if err != nil {
		return -1, err
	}
	defer h.release()
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), nr, uintptr(unsafe.Pointer(arg)))
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

// A flexible is a kernel structure that ends in an array: a header H and
// elements E right behind it. Its memory is made of 64-bit words, which
// aligns every H and E that is used here.
type flexible[H, E any] struct{ words []uint64 }

func newFlexible[H, E any](head H, elements []E) flexible[H, E] {
	f := sizedFlexible[H, E](head, len(elements))
	copy(f.elements(len(elements)), elements)
	return f
}

func sizedFlexible[H, E any](head H, n int) flexible[H, E] {
	var e E
	size := unsafe.Sizeof(head) + uintptr(n)*unsafe.Sizeof(e)
	f := flexible[H, E]{make([]uint64, (size+7)/8)}
	*f.head() = head
	return f
}

// head points into words, which is never empty: H has at least one field.
func (f flexible[H, E]) head() *H { return (*H)(unsafe.Pointer(&f.words[0])) }

// elements is a view of words; n is at most what the value was made for.
func (f flexible[H, E]) elements(n int) []E {
	if n == 0 {
		return nil
	}
	var h H
	return unsafe.Slice((*E)(unsafe.Add(unsafe.Pointer(&f.words[0]), unsafe.Sizeof(h))), n)
}

// bytesPointer does an ioctl on a buffer the kernel fills or reads; the
// caller has checked that it is as long as the kernel assumes.
func bytesPointer(h *handle, nr uintptr, p []byte) error {
	_, err := pointer(h, nr, unsafe.SliceData(p))
	return err
}

// addressOf is for structures that carry a pointer in a field. The caller has
// pinned p.
func addressOf[T any](p *T) uint64 { return uint64(uintptr(unsafe.Pointer(p))) }
