package trie

import (
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// attrInfo is union bpf_attr of BPF_OBJ_GET_INFO_BY_FD.
type attrInfo struct {
	descriptor uint32
	length     uint32
	info       uint64
}

// mapInfo is the beginning of struct bpf_map_info, of which the kernel writes no more than is asked for.
type mapInfo struct {
	kind uint32
	id   uint32
}

// mapID is by what the kernel knows a map. Map.Info knows it, too, and reads a file of /proc for what it says beside that: a twentieth
// of a change of policy.
func mapID(m *ebpf.Map) (ebpf.MapID, error) {
	info := new(mapInfo)
	// Its address is in an integer: it has to stay where it is until the kernel has written there, which a stack does not.
	var pin runtime.Pinner
	pin.Pin(info)
	defer pin.Unpin()
	attr := attrInfo{descriptor: uint32(m.FD()), length: uint32(unsafe.Sizeof(*info)), info: uint64(uintptr(unsafe.Pointer(info)))}
	_, err := linux.BPF(unix.BPF_OBJ_GET_INFO_BY_FD, &attr)
	runtime.KeepAlive(m)
	return ebpf.MapID(info.id), err
}
