// Package memory is guest RAM: the only door to it for devices and the boot
// loader, and the copy-on-write machinery under snapshots and forks.
//
// All RAM of a VM is one private mapping of this process, laid over a stack of
// read-only layers. A page that somebody wrote (the guest, a device, the boot
// loader) is to the host kernel a private page, and the set of private pages is
// exactly what changed since the memory was made or last frozen. Nothing else
// tracks writes.
//
// Pages are numbered from 0 in the order of the regions, without the hole in the
// guest-physical address space: page n of RAM is at byte n*PageSize of the host
// mapping. Extents and layers use these numbers.
//
// # Who may call what
//
// The access functions (ReadAt, WriteAt, Access, the fixed-size reads and
// writes) may be called from any goroutine at any time until Close. They give
// no ordering among each other beyond what each says. Private, Freeze and Dump
// expect that nobody writes guest memory while they run; the owner stops vCPUs
// and devices first. Close expects that vCPUs and devices are gone.
//
// # Backing store that shrinks
//
// New checks that every layer file is as long as its extents say. If a file is
// truncated later, touching a page of it raises SIGBUS. The functions of this
// package turn that into an error that wraps ErrBackingLost. A system call that
// is given a slice of guest memory (inside Access) fails with EFAULT instead,
// and so does KVM_RUN.
package memory
