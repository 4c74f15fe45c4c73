package linux

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// MaxFiles is how many descriptors one message can carry (SCM_MAX_FD).
const MaxFiles = 253

// SendFiles sends payload, which must not be empty, and with its first byte
// the descriptors of files. The files stay open here. The whole payload is
// sent or an error returned.
func SendFiles(conn *net.UnixConn, payload []byte, files ...*os.File) error {
	if len(payload) == 0 || len(files) > MaxFiles {
		return fmt.Errorf("send descriptors (%d): %w", len(files), unix.EINVAL)
	}
	var control []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fd, err := descriptor(f)
			if err != nil {
				return fmt.Errorf("send descriptors (%d): %w", len(files), err)
			}
			fds[i] = fd
		}
		control = unix.UnixRights(fds...)
		defer runtime.KeepAlive(files)
	}
	n, _, err := conn.WriteMsgUnix(payload, control, nil)
	for err == nil && n < len(payload) { // a stream may take part of it
		var more int
		more, err = conn.Write(payload[n:])
		n += more
	}
	if err != nil {
		return fmt.Errorf("send descriptors (%d): %w", len(files), err)
	}
	return nil
}

// NextMessage waits for a message of a packet socket and returns its length, without taking it. At the end it is 0.
func NextMessage(conn *net.UnixConn) (length int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("look at next message: %w", err)
	}
	var failed error
	err = raw.Read(func(fd uintptr) (done bool) {
		for {
			length, _, _, _, failed = unix.Recvmsg(int(fd), nil, nil, unix.MSG_PEEK|unix.MSG_TRUNC)
			if failed != unix.EINTR {
				return failed != unix.EAGAIN
			}
		}
	})
	if err = errors.Join(err, failed); err != nil {
		return 0, fmt.Errorf("look at next message: %w", err)
	}
	return length, nil
}

// ReceiveFiles reads one message into buf and takes at most limit descriptors
// with it, all close-on-exec and owned by the caller. If more were sent, none
// are kept and an error is returned. At the end of a stream n is 0 and the error
// is io.EOF, unwrapped.
func ReceiveFiles(conn *net.UnixConn, buf []byte, limit int) (n int, files []*os.File, err error) {
	// Room for all that a message can carry: the kernel closes what does not
	// fit, but a peer that sends too much should be told apart.
	control := make([]byte, unix.CmsgSpace(4*MaxFiles))
	n, controlLength, flags, _, err := conn.ReadMsgUnix(buf, control)
	if errors.Is(err, io.EOF) {
		return 0, nil, io.EOF
	}
	if err != nil {
		return 0, nil, fmt.Errorf("receive descriptors: %w", err)
	}
	files, err = filesOf(control[:controlLength])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("control data was cut")
	}
	if err == nil && len(files) > limit {
		err = fmt.Errorf("got %d, at most %d expected", len(files), limit)
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return 0, nil, fmt.Errorf("receive descriptors: %w", err)
	}
	return n, files, nil
}

func filesOf(control []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	for _, message := range messages {
		if message.Header.Level != unix.SOL_SOCKET || message.Header.Type != unix.SCM_RIGHTS {
			continue // credentials and the like: not asked for, harmless
		}
		fds, err := unix.ParseUnixRights(&message)
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}
