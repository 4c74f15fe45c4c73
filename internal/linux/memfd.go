package linux

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Seals of a memory file, see fcntl(2).
const (
	SealSeal        = unix.F_SEAL_SEAL         // no further seals
	SealShrink      = unix.F_SEAL_SHRINK       // size cannot get smaller
	SealGrow        = unix.F_SEAL_GROW         // size cannot get larger
	SealWrite       = unix.F_SEAL_WRITE        // contents cannot change
	SealFutureWrite = unix.F_SEAL_FUTURE_WRITE // contents cannot change, except through shared mappings that exist
)

// MemoryFile creates an empty, sealable, close-on-exec memory file. The name
// is only a label, shown in /proc/self/fd and /proc/self/maps.
func MemoryFile(name string) (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	// Linux 6.3 wants to hear that the file will never be executed; older
	// kernels answer EINVAL to the flag.
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("create memory file (%s): %w", name, err)
	}
	return os.NewFile(uintptr(fd), "memfd:"+name), nil
}

// AddSeals adds seals to a memory file. SealWrite is refused with EBUSY while
// a shared writable mapping of the file exists; private mappings do not matter.
func AddSeals(f *os.File, seals int) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal memory file (%s): %w", f.Name(), err)
	}
	return nil
}

// Seals returns the seals of a memory file. A file that cannot be sealed gives
// EINVAL.
func Seals(f *os.File) (int, error) {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return 0, fmt.Errorf("read seals (%s): %w", f.Name(), err)
	}
	return seals, nil
}

// Duplicate returns a second close-on-exec descriptor of f's open file. Both
// share one offset; each has to be closed.
func Duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor (%s): %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
