package process

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// fileConn makes a connected packet socket that arrived as a file usable. It
// closes the file.
func fileConn(f *os.File) (*conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("open launch socket: %w", err)
	}
	socket, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("open launch socket: it is a %T", c)
	}
	return newConn(socket), nil
}

// fileListener makes a listening socket that arrived as a file usable. It leaves
// the file open.
func fileListener(f *os.File) (*net.UnixListener, error) {
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("open listener: %w", err)
	}
	unixListener, ok := l.(*net.UnixListener)
	if !ok {
		l.Close()
		return nil, fmt.Errorf("open listener: it is a %T", l)
	}
	return unixListener, nil
}

// socketPair returns the two ends of a launch socket.
func socketPair() (ours *conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("create launch socket: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "launch")
	ours, err = fileConn(os.NewFile(uintptr(fds[0]), "launch"))
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}

// listen creates a listening socket under dir. A packet socket is for control
// messages, a stream socket for the guest's ports.
func listen(network, path string) (*os.File, error) {
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	return l.File()
}
