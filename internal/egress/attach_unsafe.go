package egress

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// attrObject is union bpf_attr of BPF_OBJ_GET.
type attrObject struct {
	path uint64
}

// attach attaches a pinned program to a control group, beside those that others have attached: all of them have to allow. The
// program stays until the group goes.
func attach(path string, group int, where uint32) error {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return err
	}
	// Its address is in an integer: it has to stay where it is until the kernel has read it.
	var pin runtime.Pinner
	pin.Pin(name)
	defer pin.Unpin()
	program, err := linux.BPF(unix.BPF_OBJ_GET, &attrObject{path: uint64(uintptr(unsafe.Pointer(name)))})
	if err != nil {
		return err
	}
	defer unix.Close(program)
	return linux.AttachProgram(group, program, where, unix.BPF_F_ALLOW_MULTI)
}
