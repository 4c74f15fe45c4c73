// Package boot puts a kernel into guest memory so that the first vCPU can be
// started at it: the direct boot protocol of PVH, an uncompressed ELF kernel
// entered in 32-bit protected mode without paging, as described in Xen's
// docs/misc/pvh.pandoc and include/public/arch-x86/hvm/start_info.h.
//
// Load reads files that users bring. Nothing in them can write outside of the
// place that the kernel and the initrd may have, or make Load panic.
package boot
