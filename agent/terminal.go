package agent

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// terminal opens a pseudo-terminal (pty(7)) for the command and returns our end
// of it twice, since reading and writing end at different times.
func (e *ends) terminal(size proto.TerminalSize, who *syscall.Credential) (in, out *os.File, err error) {
	master, err := syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, noStream(&os.PathError{Op: "open", Path: "/dev/ptmx", Err: err})
	}
	out = os.NewFile(uintptr(master), "terminal")
	e.host = append(e.host, out)
	slave, err := openSlave(master, size, who)
	if err != nil {
		return nil, nil, noStream(err)
	}
	e.opened = append(e.opened, slave)
	e.guest = [3]int{slave, slave, slave}
	again, err := unix.FcntlInt(uintptr(master), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, nil, noStream(err)
	}
	in = os.NewFile(uintptr(again), "terminal input")
	e.host = append(e.host, in)
	return in, out, nil
}

// openSlave opens the command's end, which belongs to the command's user.
func openSlave(master int, size proto.TerminalSize, who *syscall.Credential) (fd int, err error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, fmt.Errorf("unlock terminal: %w", err)
	}
	number, err := unix.IoctlGetUint32(master, unix.TIOCGPTN)
	if err != nil {
		return -1, fmt.Errorf("name terminal: %w", err)
	}
	path := fmt.Sprintf("/dev/pts/%d", number)
	fd, err = syscall.Open(path, syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	if who != nil {
		if err := syscall.Fchown(fd, int(who.Uid), -1); err != nil {
			syscall.Close(fd)
			return -1, &os.PathError{Op: "chown", Path: path, Err: err}
		}
	}
	if err := resize(fd, size); err != nil {
		syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

// resize tells the kernel the size, and it the programs (SIGWINCH).
func resize(fd int, size proto.TerminalSize) error {
	err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Columns})
	if err != nil {
		return fmt.Errorf("set size of terminal: %w", err)
	}
	return nil
}
