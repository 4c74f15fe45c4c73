package linux

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// TapHeader is the size of what is before each frame of a TAP device: struct virtio_net_hdr with the number of buffers.
const TapHeader = 12

// CreateTap makes an open /dev/net/tun a new TAP device of the calling thread's network namespace, which ends with the
// descriptor. Frames have a TapHeader.
func CreateTap(fd int, name string) error {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("create TAP device (%s): %w", name, err)
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return fmt.Errorf("create TAP device (%s): %w", name, err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, TapHeader); err != nil {
		return fmt.Errorf("set header of TAP device (%s): %w", name, err)
	}
	return nil
}

// SetTapOffloads says what frames that are read from a TAP device may leave undone: bits TUN_F_….
func SetTapOffloads(fd int, offloads uint) error {
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, int(offloads)); err != nil {
		return fmt.Errorf("set offloads of TAP device: %w", err)
	}
	return nil
}
