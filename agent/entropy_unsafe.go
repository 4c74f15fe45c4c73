package agent

import (
	"encoding/binary"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// addEntropy credits p, all of it as entropy, to the kernel (RNDADDENTROPY,
// random(4)). Its argument is struct rand_pool_info: the credit in bits and the
// size in bytes, both int, then the bytes.
func addEntropy(fd uintptr, p []byte) error {
	info := make([]byte, 8, 8+len(p))
	binary.NativeEndian.PutUint32(info[0:], uint32(8*len(p)))
	binary.NativeEndian.PutUint32(info[4:], uint32(len(p)))
	info = append(info, p...)
	// info is kept alive past the call, and the kernel only reads it meanwhile.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info[0])))
	runtime.KeepAlive(info)
	if errno != 0 {
		return errno
	}
	return nil
}
