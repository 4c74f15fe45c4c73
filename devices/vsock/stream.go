package vsock

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// errWouldBlock says that a stream has nothing to read or no room to write now.
var errWouldBlock = errors.New("would block")

// stream is the host's end of a connection. Read and write never block. Each of the two wait functions may run beside
// anything but itself; close ends it.
type stream interface {
	// read takes what is there, errWouldBlock if nothing is, io.EOF if nothing will be.
	read(p []byte) (int, error)
	// write may take less than all of p; the error, errWouldBlock too, is about the rest.
	write(p []byte) (int, error)
	// shutdown ends the directions: the host's reader sees the end of file, its writer an error.
	shutdown(read, write bool)
	// readable reports whether read has something to say.
	readable() bool
	// hungUp reports whether the host's program has closed both directions.
	hungUp() bool
	// waitRead returns when read has something to say, waitHangUp when hungUp does. Only one of both at a time.
	waitRead()
	waitHangUp()
	// waitWrite returns when write can take something.
	waitWrite()
	close()
}

// socket is a stream on a socket of the Go network poller. Reads and writes go past the poller's locks, so that they can be
// done while a goroutine waits in it.
type socket struct {
	conn net.Conn
	raw  syscall.RawConn
}

// newStream makes a stream of a connection and owns it if it succeeds.
func newStream(conn net.Conn) (stream, error) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("use host connection (%T): %w", conn, ErrNoDescriptor)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("use host connection: %w", err)
	}
	return &socket{conn: conn, raw: raw}, nil
}

// Pipe returns two connected stream sockets with half-close, for a DialHost whose service is in this process.
func Pipe() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("create socket pair: %w", err)
	}
	if a, err = fileConn(fds[0]); err != nil {
		_ = unix.Close(fds[1])
		return nil, nil, err
	}
	if b, err = fileConn(fds[1]); err != nil {
		_ = a.Close()
		return nil, nil, err
	}
	return a, b, nil
}

// fileConn owns the descriptor, also when it fails.
func fileConn(fd int) (net.Conn, error) {
	file := os.NewFile(uintptr(fd), "socket pair")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("create socket pair: %w", err)
	}
	return conn, nil
}

func (s *socket) read(p []byte) (int, error) {
	var n int
	var err error
	if failure := s.raw.Control(func(fd uintptr) { n, err = retry(func() (int, error) { return unix.Read(int(fd), p) }) }); failure != nil {
		return 0, failure
	}
	switch {
	case err == unix.EAGAIN:
		return 0, errWouldBlock
	case err != nil:
		return 0, err
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

func (s *socket) write(p []byte) (int, error) {
	written := 0
	for written < len(p) {
		var n int
		var err error
		failure := s.raw.Control(func(fd uintptr) {
			n, err = retry(func() (int, error) {
				return unix.SendmsgN(int(fd), p[written:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			})
		})
		switch {
		case failure != nil:
			return written, failure
		case err == unix.EAGAIN:
			return written, errWouldBlock
		case err != nil:
			return written, err
		}
		written += n
	}
	return written, nil
}

// retry repeats a system call that a signal interrupted; it has done nothing then.
func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func (s *socket) shutdown(read, write bool) {
	how := unix.SHUT_RDWR
	switch {
	case !write:
		how = unix.SHUT_RD
	case !read:
		how = unix.SHUT_WR
	}
	// It fails on a socket whose peer is gone, and then there is nobody to tell.
	_ = s.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), how) })
	if read {
		s.discard()
	}
}

// discard throws away what has not been read. A writer that waits in poll for room does not hear of the shutdown; it hears of
// the room, and then of the rest.
func (s *socket) discard() {
	var waste [16 << 10]byte
	for range 64 { // far more than a Unix socket holds
		if _, err := s.read(waste[:]); err != nil {
			return
		}
	}
}

func (s *socket) readable() (there bool) {
	_ = s.raw.Control(func(fd uintptr) { there = pollNow(fd, unix.POLLIN|unix.POLLRDHUP) != 0 })
	return there
}

func (s *socket) hungUp() bool {
	gone := true
	_ = s.raw.Control(func(fd uintptr) { gone = pollNow(fd, 0)&(unix.POLLHUP|unix.POLLERR) != 0 })
	return gone
}

// The wait functions ask the kernel for the state and the poller only for a change of it: the poller reports edges, and one
// that came before the wait is not reported again. They return at once when the socket is closed.

func (s *socket) waitRead() {
	_ = s.raw.Read(func(fd uintptr) bool { return pollNow(fd, unix.POLLIN|unix.POLLRDHUP) != 0 })
}

func (s *socket) waitHangUp() {
	_ = s.raw.Read(func(fd uintptr) bool { return pollNow(fd, 0)&(unix.POLLHUP|unix.POLLERR) != 0 })
}

func (s *socket) waitWrite() {
	_ = s.raw.Write(func(fd uintptr) bool { return pollNow(fd, unix.POLLOUT) != 0 })
}

func (s *socket) close() { _ = s.conn.Close() }

// pollNow returns which of the events hold, plus errors and hang-up.
func pollNow(fd uintptr, events int16) int16 {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	if _, err := retry(func() (int, error) { return unix.Poll(fds, 0) }); err != nil {
		return unix.POLLERR
	}
	return fds[0].Revents
}
