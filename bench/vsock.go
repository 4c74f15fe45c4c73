package bench

import (
	"context"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// vsockConn is a connection to a guest through the host's kernel. Package net
// knows no such sockets.
type vsockConn struct {
	*os.File
	address vsockAddress
}

type vsockAddress struct{ cid, port uint32 }

func (a vsockAddress) Network() string { return "vsock" }
func (a vsockAddress) String() string  { return fmt.Sprintf("%d:%d", a.cid, a.port) }

func (c vsockConn) LocalAddr() net.Addr  { return vsockAddress{} }
func (c vsockConn) RemoteAddr() net.Addr { return c.address }

// dialVsock connects to a guest's port. The call itself waits a second at most,
// since a guest that does not run yet leaves it without an answer.
func dialVsock(ctx context.Context, cid, port uint32) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	// AF_VSOCK's own option for the time that connecting may take.
	limit := unix.Timeval{Sec: 1}
	err = unix.SetsockoptTimeval(fd, unix.AF_VSOCK, unix.SO_VM_SOCKETS_CONNECT_TIMEOUT_NEW, &limit)
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrVM{CID: cid, Port: port})
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect to vsock %d:%d: %w", cid, port, err)
	}
	return vsockConn{os.NewFile(uintptr(fd), "vsock"), vsockAddress{cid, port}}, nil
}
