package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// HalfConn is a connection whose two directions end one by one, as those of TCP
// and Unix sockets do.
type HalfConn interface {
	net.Conn
	CloseWrite() error
}

// Conn is a connection to a program in a guest. A connection that broke is an
// error of Read, not an end.
type Conn struct {
	*net.UnixConn
	broken chan error // receives why, before the other end is closed
	once   sync.Once
	err    error
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.UnixConn.Read(p)
	if err != io.EOF {
		return n, err
	}
	c.once.Do(func() {
		select {
		case c.err = <-c.broken:
		default:
		}
	})
	if c.err != nil {
		return n, c.err
	}
	return n, err
}

// Dial connects to a socket on which a program in the guest listens, without any
// network: "unix" with a path, or "tcp" with ":PORT", which is the guest's loopback
// address, or "IP:PORT". It needs one of the guest agent's operations for as long
// as the connection is open. When the guest ends or is reset it breaks.
func (c *Client) Dial(ctx context.Context, network, address string) (*Conn, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("connect to %s %s in guest: %w", network, address, err)
	}
	// ctx bounds the making of the connection only.
	life, cancel := context.WithCancelCause(context.Background())
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	conn := &Conn{UnixConn: ours, broken: make(chan error, 1)}
	connected, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		err := c.relay(life, theirs, network, address, func() { close(connected) })
		if err != nil {
			conn.broken <- err
		}
		ended <- err
		theirs.Close()
		cancel(nil)
	}()
	defer stop()
	select {
	case <-connected:
		return conn, nil
	case err := <-ended:
		if err == nil { // connected, and over already
			return conn, nil
		}
		ours.Close()
		return nil, err
	}
}

func socketPair() (ours, theirs *net.UnixConn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "connection")
		defer f.Close()
		conn, fileErr := net.FileConn(f)
		if fileErr != nil {
			err = fileErr
			continue
		}
		ends[i] = conn.(*net.UnixConn)
	}
	if err != nil {
		for _, e := range ends {
			if e != nil {
				e.Close()
			}
		}
	}
	return ends[0], ends[1], err
}

// Relay connects conn with a socket in the guest as Dial does, until both
// directions have ended, one has broken or ctx is done, and closes it. A TCP
// connection whose other side broke is reset.
func (c *Client) Relay(ctx context.Context, conn HalfConn, network, address string) error {
	err := c.relay(ctx, conn, network, address, func() {})
	if tcp, ok := conn.(*net.TCPConn); ok && err != nil {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
	return err
}

// relay calls connected once the guest has answered. It does not close conn.
func (c *Client) relay(ctx context.Context, conn HalfConn, network, address string, connected func()) error {
	q := proto.NewQueue(outputWindow)
	k, err := c.begin(ctx, proto.OpConnect, proto.Request{Generation: c.cfg.Generation},
		proto.ConnectRequest{Network: network, Address: proto.Text(address)}, map[uint16]*proto.Queue{proto.Stdout: q})
	if err != nil {
		return err
	}
	window := proto.NewWindow()
	k.onStart = func(proto.Started) { connected() }
	k.onCredit = func(_ uint16, n int, f proto.Flags) error {
		if f&proto.FlagEnd != 0 {
			window.Close()
			return nil
		}
		return window.Add(n)
	}
	// Nothing waits for conn once ctx is done.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var both sync.WaitGroup
	var readErr error
	both.Go(func() {
		if readErr = k.send(conn, window); readErr != nil {
			k.conn.Close() // the guest's side breaks, too
		}
	})
	both.Go(func() { deliverTo(conn, k, q) })
	err = k.finish(&proto.ConnectResult{})
	window.Close()
	// Whoever still reads from conn waits for something that nobody wants, and after
	// an error so does whoever writes.
	if err != nil {
		q.Close()
		_ = conn.SetDeadline(time.Unix(1, 0))
	} else {
		q.End()
		_ = conn.SetReadDeadline(time.Unix(1, 0))
	}
	both.Wait()
	k.end()
	if readErr != nil && !errors.Is(readErr, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("connect in guest: %w", readErr)
	}
	return k.conclude(nil, err)
}

// deliverTo writes what the guest sends to conn, and its end. When conn takes no
// more the guest is told so.
func deliverTo(conn HalfConn, k *call, q *proto.Queue) {
	var b []byte
	for {
		var ok bool
		if b, ok = q.Pop(b); !ok {
			break
		}
		if _, err := conn.Write(b); err != nil {
			q.Close()
			_ = k.wire.WriteCredit(proto.Stdout, 0, proto.FlagEnd)
			return
		}
		if n := q.Consumed(len(b)); n > 0 {
			_ = k.wire.WriteCredit(proto.Stdout, n, 0)
		}
	}
	if q.Ended() {
		_ = conn.CloseWrite()
	}
}

// Forward accepts connections until ctx is done or the listener fails, and has each
// relayed, for example by Client.Relay; report hears of those that failed. It closes
// the listener, and returns when all connections have ended, which they do with ctx.
func Forward(ctx context.Context, l net.Listener, relay func(context.Context, HalfConn) error, report func(error)) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	var all sync.WaitGroup
	defer all.Wait()
	for {
		conn, err := l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return context.Cause(ctx)
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
			time.Sleep(20 * time.Millisecond) // connections that end free some
			continue
		case err != nil:
			return fmt.Errorf("accept connection (%v): %w", l.Addr(), err)
		}
		half, ok := conn.(HalfConn)
		if !ok {
			conn.Close()
			return fmt.Errorf("accept connection (%v): %T has no directions that end one by one", l.Addr(), conn)
		}
		all.Go(func() {
			if err := relay(ctx, half); err != nil {
				report(err)
			}
		})
	}
}
