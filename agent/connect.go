package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

const (
	// connectTimeout bounds how long a program in the guest may take to accept.
	connectTimeout = 10 * time.Second
	// connectWindow is how much of what the host sends waits for that program.
	connectWindow = 64 << 10
)

// halfConn is a connection whose two directions end one by one.
type halfConn interface {
	net.Conn
	CloseRead() error
	CloseWrite() error
}

// connect joins the host with a socket on which a program in the guest listens,
// until both directions have ended.
func (s *session) connect(r proto.ConnectRequest) (proto.ConnectResult, error) {
	var result proto.ConnectResult
	if err := s.enter(); err != nil {
		return result, err
	}
	conn, err := dialLocal(s.ctx, r)
	if err != nil {
		return result, err
	}
	defer conn.Close()
	stop := context.AfterFunc(s.ctx, func() { abort(conn) })
	defer stop()
	s.stdin = proto.NewQueue(connectWindow)
	out := &outflow{session: s, window: proto.NewWindow()}
	s.windows = map[uint16]*proto.Window{proto.Stdout: out.window}
	s.announce(proto.Started{})
	s.listen()

	received := make(chan int64, 1)
	go func() { received <- s.toSocket(conn) }()
	result.Sent, err = fromSocket(out, conn)
	if err != nil {
		abort(conn)
		s.stdin.Close()
	}
	result.Received = <-received
	return result, err
}

// toSocket writes what comes from the host, and its end. When the program takes no
// more the host is told so.
func (s *session) toSocket(conn halfConn) int64 {
	n, err := io.Copy(onlyWriter{conn}, &inflow{session: s})
	switch {
	case err == nil:
		_ = conn.CloseWrite()
	case s.ctx.Err() == nil:
		s.stdin.Close()
		_ = s.wire.WriteCredit(proto.Stdin, 0, proto.FlagEnd)
	}
	return n
}

// fromSocket sends what the program writes, and its end. A host that wants no more
// of it is no error.
func fromSocket(out *outflow, conn halfConn) (int64, error) {
	n, err := out.ReadFrom(conn)
	if err == nil {
		return n, out.end()
	}
	if out.window.Closed() && out.ctx.Err() == nil {
		_ = conn.CloseRead()
		return n, nil
	}
	return n, connectError(err)
}

// onlyWriter hides that a socket could read from the connection by itself.
type onlyWriter struct{ io.Writer }

// abort ends a connection so that the program sees it broken, not ended.
func abort(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

// dialLocal connects to a Unix socket, or to a TCP port of this machine.
func dialLocal(ctx context.Context, r proto.ConnectRequest) (halfConn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	var addresses []string
	switch {
	case r.Network == "unix" && r.Address != "":
		addresses = []string{string(r.Address)}
	case r.Network == "tcp":
		host, port, err := net.SplitHostPort(string(r.Address))
		if n, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || n == 0 {
			return nil, failure(proto.CodeInvalidRequest, "address %.80q is not [IP]:PORT", r.Address)
		}
		if host == "" {
			addresses = []string{"127.0.0.1:" + port, "[::1]:" + port}
		} else if net.ParseIP(host) != nil {
			addresses = []string{string(r.Address)}
		} else {
			return nil, failure(proto.CodeInvalidRequest, "address %.80q has no IP address", r.Address)
		}
	default:
		return nil, failure(proto.CodeInvalidRequest, "connect to %.20q %.80q", r.Network, r.Address)
	}
	var dialer net.Dialer
	var first error
	for _, address := range addresses {
		conn, err := dialer.DialContext(ctx, r.Network, address)
		if err == nil {
			return conn.(halfConn), nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, connectError(first)
}

// connectError gives an error of a socket a stable word.
func connectError(err error) *proto.Error {
	code := codeOf(err, "", []errorWord{
		{syscall.ECONNREFUSED, proto.CodeConnectionRefused},
		{syscall.ECONNRESET, proto.CodeConnectionReset},
		{syscall.EPIPE, proto.CodeConnectionReset},
		{syscall.ENETUNREACH, proto.CodeUnreachable},
		{syscall.EHOSTUNREACH, proto.CodeUnreachable},
		{syscall.ETIMEDOUT, proto.CodeUnreachable},
	})
	switch {
	case code != "":
	case errors.Is(err, context.DeadlineExceeded):
		code = proto.CodeUnreachable
	default:
		return fileError(err)
	}
	return failure(code, "%v", err)
}
