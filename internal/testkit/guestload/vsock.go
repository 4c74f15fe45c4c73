package main

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

func listenVsock(port uint32) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err != nil {
		return -1, err
	}
	return fd, unix.Listen(fd, 64)
}

// acceptVsock waits for a connection. One that broke before it was accepted is
// no error of the listener.
func acceptVsock(listener int) (fd int, err error) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNABORTED || err == unix.ECONNRESET {
			continue
		}
		if err != nil {
			return -1, fmt.Errorf("accept: %w", err)
		}
		return fd, nil
	}
}

// socketConn is a socket of a family that package net does not know.
type socketConn struct{ *os.File }

func (socketConn) LocalAddr() net.Addr  { return &net.UnixAddr{} }
func (socketConn) RemoteAddr() net.Addr { return &net.UnixAddr{} }
