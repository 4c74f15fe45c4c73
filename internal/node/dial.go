package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
)

// dialGuest connects to a port of a guest through its Unix socket.
func dialGuest(ctx context.Context, path string, port uint32) (net.Conn, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return &guestConn{Conn: c, port: port, line: fmt.Appendf(nil, "CONNECT %d\n", port)}, nil
}

// maxAnswer is longer than any answer of a VM's socket.
const maxAnswer = 32

// guestConn says where it is to go with the first bytes that are sent, and takes the
// answer to that off the first that come: a request does not wait for the connection
// that it goes on. That nobody listens at the port is an error of the first Read. One
// goroutine may read.
type guestConn struct {
	net.Conn
	port uint32

	mu   sync.Mutex
	line []byte // to be sent first; nil: it was

	answered bool
	rest     []byte // what came with the answer
}

// Write implements net.Conn.
func (c *guestConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	if c.line == nil {
		c.mu.Unlock()
		return c.Conn.Write(p)
	}
	defer c.mu.Unlock()
	line := c.line
	c.line = nil
	n, err := c.Conn.Write(append(line, p...))
	return max(n-len(line), 0), err
}

// Read implements net.Conn.
func (c *guestConn) Read(p []byte) (int, error) {
	if !c.answered {
		if err := c.answer(); err != nil {
			return 0, fmt.Errorf("connect to guest port %d: %w", c.port, err)
		}
		c.answered = true
	}
	if len(c.rest) > 0 {
		n := copy(p, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// answer reads the line of the VM's socket.
func (c *guestConn) answer() error {
	c.mu.Lock()
	waiting := c.line != nil // whoever sends nothing is to hear all the same
	c.mu.Unlock()
	if waiting {
		if _, err := c.Write(nil); err != nil {
			return err
		}
	}
	b := make([]byte, 512)
	for n := 0; n < maxAnswer; {
		m, err := c.Conn.Read(b[n:])
		n += m
		if end := bytes.IndexByte(b[:n], '\n'); end >= 0 {
			if !bytes.HasPrefix(b, []byte("OK ")) {
				return fmt.Errorf("unexpected answer %q", b[:end])
			}
			c.rest = b[end+1 : n]
			return nil
		}
		if err != nil {
			return errors.New("refused")
		}
	}
	return fmt.Errorf("unexpected answer %q", b[:maxAnswer])
}
