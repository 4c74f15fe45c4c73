package boot

// Entry is where the first vCPU starts: in 32-bit protected mode with flat
// segments, paging and interrupts off, RIP at Address and EBX holding StartInfo
// (the x86/HVM direct boot ABI of Xen, "PVH").
type Entry struct {
	Address   uint64 // physical, below 4 GiB
	StartInfo uint64 // physical, of the start information
}
