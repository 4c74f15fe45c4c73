package egress

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bpf makes the system call with one of the attribute structs below, which it keeps alive. The kernel takes a short one for one
// that ends in zeros.
func bpf[T any](command int, attr *T) (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(unsafe.Pointer(attr)), unsafe.Sizeof(*attr))
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// attrObject is union bpf_attr of BPF_OBJ_GET.
type attrObject struct {
	path uint64
}

// attrAttach is union bpf_attr of BPF_PROG_ATTACH.
type attrAttach struct {
	target  uint32
	program uint32
	where   uint32
	flags   uint32
}

// attach attaches a pinned program to a control group, beside those that others have attached: all of them have to allow. The
// program stays until the group goes. github.com/cilium/ebpf/link does the same, and costs each program that has it in it
// what its many other kinds of links cost.
func attach(path string, group int, where uint32) error {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	// The name's address is in an integer: it has to stay where it is until the kernel has read it, which Go's heap does.
	program, err := bpf(unix.BPF_OBJ_GET, &attrObject{path: uint64(uintptr(unsafe.Pointer(name)))})
	runtime.KeepAlive(name)
	if err != nil {
		return err
	}
	defer unix.Close(program)
	_, err = bpf(unix.BPF_PROG_ATTACH, &attrAttach{
		target: uint32(group), program: uint32(program), where: where, flags: unix.BPF_F_ALLOW_MULTI,
	})
	return err
}
