package linux

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// attrAttach is union bpf_attr of BPF_PROG_ATTACH. The kernel takes a short one for one that ends in zeros.
type attrAttach struct {
	target  uint32
	program uint32
	where   uint32
	flags   uint32
}

// AttachProgram attaches an eBPF program to a target, which is a descriptor or the number of an interface of the calling thread's
// network namespace, for as long as there is one. github.com/cilium/ebpf/link does the same, and costs each program that has it
// in it what its many other kinds of links cost.
func AttachProgram(target, program int, where, flags uint32) error {
	attr := attrAttach{target: uint32(target), program: uint32(program), where: where, flags: flags}
	// The attributes stay where they are until the call returns.
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_ATTACH, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 {
		return errno
	}
	return nil
}
