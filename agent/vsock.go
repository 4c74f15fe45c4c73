package agent

import (
	"fmt"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// VsockAddr is the address of one end of a vsock connection.
type VsockAddr struct{ CID, Port uint32 }

// Network implements net.Addr.
func (VsockAddr) Network() string { return "vsock" }

// String implements net.Addr.
func (a VsockAddr) String() string {
	return strconv.FormatUint(uint64(a.CID), 10) + ":" + strconv.FormatUint(uint64(a.Port), 10)
}

// ListenVsock listens on a vsock port for connections from the host. Programs
// in the guest, which could reach the port through the loopback transport, are
// turned away: the agent does as it is told, with root's rights.
func ListenVsock(port uint32) (net.Listener, error) {
	return listenVsock(port, unix.VMADDR_CID_HOST)
}

// listenVsock takes connections from one peer only.
func listenVsock(port, peer uint32) (net.Listener, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("create vsock socket: %w", err)
	}
	err = unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port})
	if err == nil {
		err = unix.Listen(fd, unix.SOMAXCONN)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on vsock port %d: %w", port, err)
	}
	return &vsockListener{file: os.NewFile(uintptr(fd), "vsock"), addr: VsockAddr{unix.VMADDR_CID_ANY, port}, peer: peer}, nil
}

type vsockListener struct {
	file *os.File
	addr VsockAddr
	peer uint32 // context id
}

func (l *vsockListener) Addr() net.Addr { return l.addr }
func (l *vsockListener) Close() error   { return l.file.Close() }

func (l *vsockListener) Accept() (net.Conn, error) {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	for {
		var fd int
		var peer unix.Sockaddr
		var acceptErr error
		err := raw.Read(func(s uintptr) bool {
			fd, peer, acceptErr = unix.Accept4(int(s), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return acceptErr != unix.EAGAIN
		})
		if err != nil {
			return nil, err
		}
		if acceptErr != nil {
			return nil, acceptErr
		}
		vm, ok := peer.(*unix.SockaddrVM)
		if !ok || vm.CID != l.peer {
			unix.Close(fd)
			continue
		}
		return &vsockConn{File: os.NewFile(uintptr(fd), "vsock"), local: l.addr, remote: VsockAddr{vm.CID, vm.Port}}, nil
	}
}

// vsockConn is a connection as net.Conn. os.File does all the work, the
// runtime's poller takes any socket.
type vsockConn struct {
	*os.File
	local, remote VsockAddr
}

func (c *vsockConn) LocalAddr() net.Addr  { return c.local }
func (c *vsockConn) RemoteAddr() net.Addr { return c.remote }
