package probe

import "unsafe"

// hostAddress is of memory that mmap made, which stays where it is until
// close unmaps it, after the VM is gone.
func hostAddress(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
