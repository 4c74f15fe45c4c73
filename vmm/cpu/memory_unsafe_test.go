package cpu

import "unsafe"

// hostAddress is of memory that mmap made, which does not move.
func hostAddress(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
