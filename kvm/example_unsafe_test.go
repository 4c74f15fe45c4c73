package kvm_test

import "unsafe"

// addressOf is of memory that mmap made, which does not move.
func addressOf(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
