package linux

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// BPF makes the system call bpf(2) with the attribute struct, which stays where it is until the call returns, and returns what that
// does. The kernel takes a short struct for one that ends in zeros. Memory whose address is in it as an integer has to be pinned.
func BPF[T any](command int, attr *T) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(unsafe.Pointer(attr)), unsafe.Sizeof(*attr))
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// attrAttach is union bpf_attr of BPF_PROG_ATTACH.
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
	_, err := BPF(unix.BPF_PROG_ATTACH, &attrAttach{target: uint32(target), program: uint32(program), where: where, flags: flags})
	return err
}
