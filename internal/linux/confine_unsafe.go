package linux

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Confine takes from the calling process what root has beside its descriptors: dir, a directory, becomes all that there is of
// the file system, and privileges are gone for good, those of programs that it might run, too. Nor can other processes without
// privileges look into it. It needs CAP_SYS_CHROOT. When it fails some of it may have happened.
func Confine(dir *os.File) error {
	fd, err := descriptor(dir)
	if err != nil {
		return fmt.Errorf("confine process: %w", err)
	}
	if err := unix.Fchdir(fd); err != nil {
		return fmt.Errorf("confine process: enter directory: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("confine process: change root: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("confine process: hide it: %w", err)
	}
	// Each thread has its own of these; those to come get theirs from the thread that makes them.
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("confine process: keep privileges out: %w", errno)
	}
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	none := &[2]unix.CapUserData{}
	// Both live until the call returns, and the kernel keeps neither address.
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(none)), 0)
	if errno != 0 {
		return fmt.Errorf("confine process: give privileges up: %w", errno)
	}
	return nil
}
