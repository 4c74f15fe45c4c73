package main

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// offloads turns the card's off: checksums of what is received and sent, scatter-gather, segmentation in the card and in the
// kernel, and merging of what is received.
func offloads([]string) error {
	const (
		setRxChecksum = 0x15 // ETHTOOL_SRXCSUM and so on, see linux/ethtool.h
		setTxChecksum = 0x17
		setSG         = 0x19
		setTSO        = 0x1f
		setGSO        = 0x24
		setGRO        = 0x2c
	)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(fd)
	for _, command := range []uint32{setTSO, setGSO, setGRO, setSG, setTxChecksum, setRxChecksum} {
		value := struct{ command, data uint32 }{command, 0}
		request := struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer // to value, which is kept alive below
			_    [16]byte       // the kernel's structure is larger
		}{data: unsafe.Pointer(&value)}
		copy(request.name[:], "eth0")
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		runtime.KeepAlive(&value)
		if errno != 0 && errno != unix.EOPNOTSUPP {
			return fmt.Errorf("ethtool %#x: %w", command, errno)
		}
	}
	return nil
}
