package vsock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// handshakeTime is how long a client may take to say where it wants to go, handshakes how many may be at that.
	handshakeTime = 10 * time.Second
	handshakes    = 64
	// maxConnectLine is longer than any valid request of a client.
	maxConnectLine = 32
	// dialTime bounds one DialHost call.
	dialTime = 10 * time.Second
	// After an error, accepting is tried again; it fails as long as the process has no descriptors left.
	minAcceptPause = 5 * time.Millisecond
	maxAcceptPause = time.Second
)

// host is everything about connections that happens outside of the router's goroutine: clients that arrive, DialHost, last
// bytes.
type host struct {
	router   *router
	listener net.Listener
	dialHost func(ctx context.Context, port uint32) (net.Conn, error)
	eager    []uint32
	limit    int

	ctx        context.Context // ends with the device
	cancel     context.CancelFunc
	goroutines sync.WaitGroup

	mu      sync.Mutex // guards what follows, and the dialing of connections
	started bool
	closed  bool
	// live has each connection from admit to release.
	live map[*connection]*dialing
}

// dialing is the DialHost part of a connection.
type dialing struct {
	busy      bool // the call has not returned
	abandoned bool // nobody wants the outcome
	conn      net.Conn
	err       error
}

func newHost(config Config) *host {
	h := &host{
		listener: config.Listener,
		dialHost: config.DialHost,
		eager:    config.Eager,
		limit:    config.MaxConnections,
		live:     make(map[*connection]*dialing),
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

func (h *host) connections() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.live)
}

// admit counts a new connection, or says why there can be none.
func (h *host) admit(c *connection) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.closed:
		return ErrClosed
	case len(h.live) >= h.limit:
		return ErrTooMany
	}
	h.live[c] = &dialing{}
	return nil
}

func (h *host) release(c *connection) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.live, c)
}

// start begins to accept clients.
func (h *host) start() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.started || h.closed || h.listener == nil {
		return
	}
	h.started = true
	h.goroutines.Go(h.accept)
}

// accept lets clients in until the device is closed.
func (h *host) accept() {
	turns := make(chan struct{}, handshakes)
	pause := minAcceptPause
	for {
		select {
		case turns <- struct{}{}:
		case <-h.ctx.Done():
			return
		}
		conn, err := h.listener.Accept()
		if err == nil {
			pause = minAcceptPause
			if lineThere(conn) {
				<-turns
				port, err := readConnect(conn)
				h.lead(conn, port, err)
				continue
			}
			h.goroutines.Go(func() {
				defer func() { <-turns }()
				h.greet(conn)
			})
			continue
		}
		<-turns
		if h.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, maxAcceptPause)
		case <-h.ctx.Done():
			return
		}
	}
}

// greet hears where a client wants to go and hands it to the router. The answer is the router's.
func (h *host) greet(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(handshakeTime))
	stop := context.AfterFunc(h.ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	port, err := readConnect(conn)
	if !stop() || conn.SetDeadline(time.Time{}) != nil {
		err = errors.Join(err, ErrClosed)
	}
	h.lead(conn, port, err)
}

// lead hands a client over to the router that has said where it wants to go.
func (h *host) lead(conn net.Conn, port uint32, err error) {
	if err == nil {
		err = h.connect(conn, &connection{ports: portPair{guest: port}, greet: true})
	}
	if err != nil {
		_ = conn.Close()
	}
}

// lineThere reports whether the client's line has come completely.
func lineThere(conn net.Conn) (there bool) {
	raw, err := rawConn(conn)
	if err != nil {
		return false
	}
	var line [maxConnectLine]byte
	_ = raw.Control(func(fd uintptr) {
		n, _ := peekNow(fd, line[:])
		there = bytes.IndexByte(line[:n], '\n') >= 0
	})
	return there
}

// readConnect reads the client's line, and not a byte more: the next one may be data. So it looks first how long the line
// is.
func readConnect(conn net.Conn) (uint32, error) {
	var line [maxConnectLine]byte
	for n := 0; n < len(line); {
		seen, err := peek(conn, line[n:])
		end := bytes.IndexByte(line[n:n+seen], '\n')
		if end >= 0 {
			seen = end + 1
		}
		if err == nil {
			_, err = io.ReadFull(conn, line[n:n+seen])
		}
		if err != nil {
			return 0, fmt.Errorf("read request: %w", err)
		}
		if n += seen; end >= 0 {
			return parseConnect(line[:n-1])
		}
	}
	return 0, errors.New("read request: line too long")
}

// peek waits for bytes of the connection and leaves them in it.
func peek(conn net.Conn, p []byte) (n int, err error) {
	raw, err := rawConn(conn)
	if err != nil {
		return 0, err
	}
	failed := raw.Read(func(fd uintptr) bool {
		n, err = peekNow(fd, p)
		return err != unix.EAGAIN
	})
	switch {
	case failed != nil:
		return 0, failed
	case err == nil && n == 0:
		err = io.EOF
	}
	return n, err
}

// peekNow is peek for what is there; EAGAIN if that is nothing.
func peekNow(fd uintptr, p []byte) (int, error) {
	return retry(func() (int, error) {
		n, _, err := unix.Recvfrom(int(fd), p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return n, err
	})
}

func rawConn(conn net.Conn) (syscall.RawConn, error) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return nil, ErrNoDescriptor
	}
	return c.SyscallConn()
}

// parseConnect takes "CONNECT <port>".
func parseConnect(line []byte) (uint32, error) {
	number, ok := bytes.CutPrefix(line, []byte("CONNECT "))
	if !ok {
		return 0, fmt.Errorf("read request: %q is not CONNECT <port>", line)
	}
	port, err := strconv.ParseUint(string(number), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("read request: port %q: %w", number, errors.Unwrap(err))
	}
	return uint32(port), nil
}

// connect hands a connection to the guest over to the router. Unless it fails the router owns conn.
func (h *host) connect(conn net.Conn, c *connection) error {
	s, err := newStream(conn)
	if err != nil {
		return err
	}
	c.router, c.phase, c.stream = h.router, phaseRequesting, s
	if err := h.admit(c); err != nil {
		return err
	}
	if !h.router.note(c, noteNew) {
		h.release(c)
		return ErrNotReady
	}
	return nil
}

// dialGuest is Device.Dial.
func (h *host) dialGuest(ctx context.Context, port uint32) (net.Conn, error) {
	near, far, err := Pipe()
	if err != nil {
		return nil, err
	}
	answer := make(chan error, 1)
	if err := h.connect(far, &connection{ports: portPair{guest: port}, answer: answer}); err != nil {
		_ = far.Close()
		_ = near.Close()
		return nil, err
	}
	select {
	case err = <-answer:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-h.ctx.Done():
		err = ErrClosed
	}
	if err != nil {
		// To the router this is a client that hung up.
		_ = near.Close()
		return nil, err
	}
	return near, nil
}

// dial begins to connect a guest's connection to the host, or reports that it cannot be. The outcome is a noteDialed.
func (h *host) dial(c *connection) bool {
	if h.dialHost == nil || h.admit(c) != nil {
		return false
	}
	h.mu.Lock()
	d := h.live[c]
	d.busy = true
	h.mu.Unlock()
	h.goroutines.Go(func() {
		ctx, cancel := context.WithTimeout(h.ctx, dialTime)
		defer cancel()
		conn, err := h.dialHost(ctx, c.ports.host)
		h.mu.Lock()
		d.busy = false
		d.conn, d.err = conn, err
		abandoned := d.abandoned
		h.mu.Unlock()
		if abandoned {
			h.dropDialed(c, d)
			return
		}
		h.router.note(c, noteDialed)
	})
	return true
}

// takeDialed returns the outcome of DialHost, to be owned by the caller.
func (h *host) takeDialed(c *connection) (net.Conn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.live[c]
	conn := d.conn
	d.conn = nil
	if conn == nil && d.err == nil {
		return nil, errors.New("no connection")
	}
	return conn, d.err
}

// dropDialed ends a connection that never got a stream.
func (h *host) dropDialed(c *connection, d *dialing) {
	if d.conn != nil {
		_ = d.conn.Close()
	}
	h.release(c)
}

// finish closes the host's end of a connection that the router has let go, once rest is written. The connection counts until
// then, and until a DialHost call that is under way has returned: a guest must not pile up either.
func (h *host) finish(c *connection, rest []byte) {
	if c.stream == nil {
		h.mu.Lock()
		d := h.live[c]
		d.abandoned = true
		busy := d.busy
		h.mu.Unlock()
		if !busy {
			h.dropDialed(c, d)
		}
		return
	}
	if len(rest) == 0 {
		c.stream.close()
		h.release(c)
		return
	}
	c.stream.shutdown(true, false)
	h.goroutines.Go(func() {
		writeOut(c.stream, rest)
		c.stream.close()
		h.release(c)
	})
}

// writeOut writes p at the speed of the reader, until that goes away or the stream is closed.
func writeOut(s stream, p []byte) {
	for len(p) > 0 {
		n, err := s.write(p)
		p = p[n:]
		if err == errWouldBlock {
			s.waitWrite()
		} else if err != nil {
			return
		}
	}
}

// close ends all goroutines. Streams that still write get the linger time.
func (h *host) close(linger time.Duration) {
	h.mu.Lock()
	h.closed = true
	started := h.started
	h.mu.Unlock()
	h.cancel()
	if started {
		defer h.interruptAccept()()
	}

	done := make(chan struct{})
	go func() {
		h.goroutines.Wait()
		close(done)
	}()
	timer := time.NewTimer(linger)
	defer timer.Stop()
	select {
	case <-done:
		return
	case <-timer.C:
	}
	h.mu.Lock()
	for c := range h.live {
		if c.stream != nil {
			c.stream.close()
		}
	}
	h.mu.Unlock()
	<-done
}

// interruptAccept makes Accept return, and returns how to let the listener be used again.
func (h *host) interruptAccept() (restore func()) {
	if l, ok := h.listener.(interface{ SetDeadline(time.Time) error }); ok && l.SetDeadline(time.Unix(1, 0)) == nil {
		return func() { _ = l.SetDeadline(time.Time{}) }
	}
	_ = h.listener.Close()
	return func() {}
}
