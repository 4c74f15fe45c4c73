package vsock

import (
	"fmt"
	"io"

	"github.com/forkvm/forkvm/devices/virtio"
)

// portPair names a connection: there is one guest and one host.
type portPair struct{ host, guest uint32 }

// phase is how far a connection is.
type phase int

const (
	phaseDialing    phase = iota // the guest asked, DialHost is at work
	phaseAnswering               // DialHost succeeded, the response to the guest is due
	phaseRequesting              // a host program asked, the guest has not answered
	phaseOpen
	phaseGone
)

// wants are packets that are due on a connection.
type wants uint8

const (
	wantRequest wants = 1 << iota
	wantCreditUpdate
	wantCreditRequest
)

// connection is one stream. Only the router's goroutine touches it, except for what notes guards.
type connection struct {
	router *router
	ports  portPair
	phase  phase
	stream stream // nil while dialing
	// greet: the client speaks the CONNECT protocol and waits for its OK line. answer: Dial waits for an outcome.
	greet  bool
	answer chan error

	// Guest to host. pending is what the socket had no room for; its first uncounted bytes are the OK line and no data.
	received  receiveCredit
	pending   []byte
	uncounted int
	guestDone uint32 // what the guest will not do any more, as shutdown flags
	deaf      bool   // the host program does not read any more; data for it is dropped

	// Host to guest. readable: the socket has data or its end, as far as known.
	credit       sendCredit
	readable     bool
	ended        bool   // the socket's end of file was read
	shutdownDue  uint32 // what the guest should be told that the host will not do
	shutdownSent uint32

	requested bool // the request packet is out
	eager     bool // a packet of data may follow it at once
	want      wants
	queued    bool // is in the router's run queue
	starved   bool // is in the router's set of connections that wait for credit

	readWaiting  bool // a goroutine waits for the socket, for reading or for hang-up
	writeWaiting bool

	notes notes // guarded by router.mu
}

// ready reports whether a packet could be sent to the guest now. Finding out that credit is missing makes asking for it due.
func (c *connection) ready() bool {
	switch c.phase {
	case phaseRequesting:
		return c.want&wantRequest != 0 || c.eager && c.readable && !c.ended
	case phaseAnswering:
		return true
	case phaseOpen:
		return c.dataReady() || c.want != 0 || c.shutdownDue&^c.shutdownSent != 0 || c.updateDue()
	}
	return false
}

func (c *connection) dataReady() bool {
	if !c.readable || c.ended || c.guestDone&shutdownReceive != 0 {
		return false
	}
	if c.credit.available() > 0 {
		return true
	}
	c.router.starve(c)
	return false
}

// updateDue: a guest that will not send does not need credit.
func (c *connection) updateDue() bool {
	return c.received.due() && c.guestDone&shutdownSend == 0
}

// emit sends the most important packet that is due, in the chain, which is large enough for a header. It reports false,
// and has not used the chain, when it turns out that there is nothing after all.
func (c *connection) emit(chain *virtio.Chain) (written uint32, sent bool, err error) {
	switch {
	case c.phase == phaseRequesting && !c.requested:
		c.want &^= wantRequest
		c.requested = true
		return c.sendHeader(chain, opRequest, 0)
	case c.phase == phaseRequesting:
		c.eager = false
		c.credit.update(eagerCredit, 0)
		return c.sendData(chain)
	case c.phase == phaseAnswering:
		c.phase = phaseOpen
		c.waitRead()
		return c.sendHeader(chain, opResponse, 0)
	case c.dataReady():
		return c.sendData(chain)
	case c.shutdownDue&^c.shutdownSent != 0:
		c.shutdownSent = c.shutdownDue
		if c.shutdownSent == shutdownBoth {
			// Nothing can come or go any more. The entry stays for the guest's answer.
			c.stream.close()
		}
		return c.sendHeader(chain, opShutdown, c.shutdownSent)
	case c.want&wantCreditUpdate != 0 || c.updateDue():
		c.want &^= wantCreditUpdate
		return c.sendHeader(chain, opCreditUpdate, 0)
	case c.want&wantCreditRequest != 0:
		c.want &^= wantCreditRequest
		return c.sendHeader(chain, opCreditRequest, 0)
	}
	return 0, false, nil
}

func (c *connection) sendHeader(chain *virtio.Chain, op operation, flags uint32) (uint32, bool, error) {
	return headerSize, true, c.writeHeader(chain, op, flags, 0)
}

func (c *connection) writeHeader(chain *virtio.Chain, op operation, flags, length uint32) error {
	h := header{
		sourceCID:       HostCID,
		destinationCID:  c.router.guestCID,
		sourcePort:      c.ports.host,
		destinationPort: c.ports.guest,
		length:          length,
		socketType:      typeStream,
		operation:       op,
		flags:           flags,
		bufferSize:      receiveBuffer,
		forwarded:       c.received.forwarded,
	}
	c.received.announced = c.received.forwarded
	return writeHeader(chain, &h)
}

func writeHeader(chain *virtio.Chain, h *header) error {
	var raw [headerSize]byte
	h.encode(&raw)
	return chain.WriteAt(raw[:], 0)
}

// sendData reads from the socket into the guest's buffer.
func (c *connection) sendData(chain *virtio.Chain) (written uint32, sent bool, err error) {
	limit := min(chain.WritableLen()-headerSize, maxPacketData, uint64(c.credit.available()))
	n, err := c.readInto(chain, limit)
	if err != nil || n == 0 && limit > 0 {
		return 0, false, err
	}
	if n == 0 {
		// A buffer without room for data is the driver's to see to; it gets it back unused.
		return 0, true, nil
	}
	c.credit.spend(n)
	return headerSize + n, true, c.writeHeader(chain, opData, 0, n)
}

// readInto fills at most limit bytes behind the header. What the socket says at the end decides what is known of it.
// An error is one of guest memory.
func (c *connection) readInto(chain *virtio.Chain, limit uint64) (uint32, error) {
	var total uint64
	var state error // of the socket
	err := chain.AccessWritable(headerSize, limit, func(p []byte) error {
		n, err := c.stream.read(p)
		total += uint64(n)
		if err == nil && n < len(p) {
			err = errWouldBlock
		}
		state = err
		return err
	})
	switch {
	case state == errWouldBlock:
		c.readable = false
		c.waitRead()
	case state != nil:
		c.hostEnded(state)
	case err != nil:
		return 0, err
	}
	return uint32(total), nil
}

// hostEnded follows the end of what the host program sends. A reset socket is at its end too: the guest has all that was sent
// before, and learns of the rest when it sends.
func (c *connection) hostEnded(reason error) {
	c.readable, c.ended = false, true
	c.shutdownDue |= shutdownSend
	if c.phase == phaseRequesting { // whether it is gone altogether is seen then
		c.waitRead()
		return
	}
	if reason != io.EOF || c.stream.hungUp() {
		c.hangUp()
		return
	}
	c.waitRead()
}

// hangUp follows a host program that has closed its end, or will at least not read any more. Data that it did not read is
// lost, as it is with any socket; what it sent is not: only ended says that all of that was read.
func (c *connection) hangUp() {
	c.deaf = true
	c.received.forwarded += uint32(len(c.pending) - c.uncounted)
	c.pending, c.uncounted = nil, 0
	c.shutdownDue |= shutdownReceive
	if c.guestDone&shutdownReceive != 0 {
		c.shutdownDue |= shutdownSend
	}
}

// waitRead makes the router hear when the socket has something to read or, after its end, when it is hung up.
func (c *connection) waitRead() {
	if c.readWaiting || c.deaf && c.ended {
		return
	}
	c.readWaiting = true
	wait := c.stream.waitRead
	if c.ended || c.guestDone&shutdownReceive != 0 {
		wait = c.stream.waitHangUp
	}
	c.router.host.goroutines.Go(func() {
		wait()
		c.router.note(c, noteReadable)
	})
}

func (c *connection) waitWrite() {
	if c.writeWaiting {
		return
	}
	c.writeWaiting = true
	c.router.host.goroutines.Go(func() {
		c.stream.waitWrite()
		c.router.note(c, noteWritable)
	})
}

// handleReadable follows the end of a waitRead.
func (c *connection) handleReadable() {
	c.readWaiting = false
	switch {
	case c.phase == phaseRequesting && c.stream.hungUp():
		c.router.abandon(c)
	case c.phase == phaseRequesting:
		c.readable = true // looked at when the connection is open
	case c.ended || c.guestDone&shutdownReceive != 0:
		if c.stream.hungUp() {
			c.hangUp()
		} else {
			// The wait had begun for reading.
			c.waitRead()
		}
	default:
		c.readable = true
	}
}

// handleWritable follows the end of a waitWrite.
func (c *connection) handleWritable() {
	c.writeWaiting = false
	c.flush()
}

// data takes the n bytes behind the header of a packet from the guest. An error is one of guest memory.
func (c *connection) data(chain *virtio.Chain, n uint32) error {
	err := chain.AccessReadable(headerSize, uint64(n), func(p []byte) error {
		c.toHost(p)
		return nil
	})
	if err == nil && len(c.pending) > 0 {
		c.waitWrite()
	}
	return err
}

// toHost writes to the socket what it takes now, and keeps the rest.
func (c *connection) toHost(p []byte) {
	written := 0
	if len(c.pending) == 0 && !c.deaf {
		written = c.write(p)
	}
	if c.deaf {
		c.received.forwarded += uint32(len(p) - written)
		return
	}
	c.pending = append(c.pending, p[written:]...)
}

// write counts as forwarded what the socket took. When the host program does not read any more the guest is told; it may
// still get what that program sent.
func (c *connection) write(p []byte) int {
	n, err := c.stream.write(p)
	counted := max(0, n-c.uncounted)
	c.uncounted -= n - counted
	c.received.forwarded += uint32(counted)
	if err != nil && err != errWouldBlock {
		c.deaf = true
		c.shutdownDue |= shutdownReceive
	}
	return n
}

// flush writes what is pending as far as the socket takes it.
func (c *connection) flush() {
	if len(c.pending) > 0 {
		c.pending = c.pending[c.write(c.pending):]
		if c.deaf {
			c.hangUp()
		}
	}
	if len(c.pending) > 0 {
		c.waitWrite()
		return
	}
	c.pending = nil
	if c.guestDone&shutdownSend != 0 {
		c.stream.shutdown(false, true)
	}
}

// opened follows the guest's answer to a request.
func (c *connection) opened() {
	c.phase = phaseOpen
	if c.greet {
		c.pending = fmt.Appendf(nil, "OK %d\n", c.ports.host)
		c.uncounted = len(c.pending)
		c.flush()
	}
	if c.answer != nil {
		c.answer <- nil
		c.answer = nil
	}
	if !c.readable {
		c.waitRead()
	}
}

// guestShutdown follows a shutdown packet of one direction. The other way goes on.
func (c *connection) guestShutdown(flags uint32) {
	c.guestDone |= flags
	if flags&shutdownReceive != 0 {
		c.readable = false
		c.stream.shutdown(true, false)
		c.waitRead()
	}
	if flags&shutdownSend != 0 {
		c.flush()
	}
}
