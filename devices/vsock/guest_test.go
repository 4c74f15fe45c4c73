package vsock

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

const (
	allFeatures = ^uint64(0)
	// patience is for a stuck device, not for a slow host.
	patience = 20 * time.Second

	rxBufferSize = 4096
	txSlots      = 32
	eventBuffers = 8
	// linuxPacketCost is SKB_TRUESIZE(0): what Linux 6.12.92 and later charge a packet against the receive buffer.
	linuxPacketCost = 576
	// usualBuffer is Linux's default for what a socket takes before its reader does.
	usualBuffer = 256 << 10
)

var (
	errGuestReset = errors.New("guest: connection reset")
	errGuestPipe  = errors.New("guest: broken pipe")
)

// guest is the driver and the socket layer of a guest, after Linux: its limits, when it sends credit updates, what it does to
// its sockets when the transport is reset. One goroutine serves the queues; sockets may be used from any.
type guest struct {
	t    testing.TB
	d    *virtiotest.Driver
	cid  uint64
	stop chan struct{}
	done sync.WaitGroup

	mu     sync.Mutex
	cond   *sync.Cond
	queues [3]*guestQueue
	out    [][]byte // packets that wait for a slot
	// sockets of both directions, by the host's and the guest's port.
	sockets   map[portPair]*guestSocket
	listeners map[uint32]chan *guestSocket
	nextPort  uint32
	// What tests may change before they look at it: the receive buffer of new sockets, whether events are handled.
	bufferSize   uint32
	ignoreEvents bool
	events       int // transport resets handled
	packets      map[operation]int
}

// guestQueue knows what is in the buffers of a queue.
type guestQueue struct {
	*virtiotest.Queue
	g       *guest
	seen    uint16
	buffers map[uint32]uint64 // address by head
	slots   []uint64          // free buffers
}

func newGuest(t testing.TB, dev virtiotest.Device, irq *virtiotest.Interrupt, d *virtiotest.Driver) *guest {
	g := &guest{
		t: t, d: d, cid: FirstGuestCID,
		sockets: map[portPair]*guestSocket{}, listeners: map[uint32]chan *guestSocket{}, nextPort: 1 << 20,
		bufferSize: usualBuffer, packets: map[operation]int{},
	}
	g.cond = sync.NewCond(&g.mu)
	d.Attach(dev, irq)
	return g
}

// boot initialises the device.
func (g *guest) boot(features uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.d.Start(features)
	var config [8]byte
	g.d.Device.Read(virtio.RegConfig, config[:])
	g.cid = binary.LittleEndian.Uint64(config[:])
	for i := range g.queues {
		g.queues[i] = &guestQueue{Queue: g.d.Queues[i], g: g, buffers: map[uint32]uint64{}}
	}
	for range g.queues[queueReceive].Size {
		g.queues[queueReceive].offer(g.d.Alloc(rxBufferSize, 64), rxBufferSize)
	}
	for range eventBuffers {
		g.queues[queueEvent].offer(g.d.Alloc(eventSize, 4), eventSize)
	}
	for range txSlots {
		g.queues[queueTransmit].slots = append(g.queues[queueTransmit].slots, g.d.Alloc(headerSize+maxPacketData, 64))
	}
	g.queues[queueReceive].Kick()
	g.queues[queueEvent].Kick()
}

func (q *guestQueue) offer(address uint64, n uint32) {
	q.buffers[uint32(q.Add(virtiotest.Buffer{Address: address, Length: n, Writable: true}))] = address
}

// take returns the next buffer that came back, having asked for an interrupt for the one after.
func (q *guestQueue) take() (address uint64, n uint32, ok bool) {
	u, ok := q.Poll()
	if !ok && q.g.d.Features&virtio.FeatureEventIndex != 0 {
		if err := q.g.d.Memory.WriteUint16(q.Driver+4+2*uint64(q.Size), q.seen); err != nil {
			q.g.t.Error(err)
		}
		u, ok = q.Poll()
	}
	if !ok {
		return 0, 0, false
	}
	q.seen++
	address = q.buffers[u.Head]
	delete(q.buffers, u.Head)
	return address, u.Written, true
}

// run serves the queues until halt.
func (g *guest) run() {
	g.stop = make(chan struct{})
	g.serve()
	g.done.Go(func() {
		for {
			select {
			case <-g.d.Interrupt.C():
				g.serve()
			case <-g.stop:
				return
			}
		}
	})
}

// halt stops the guest's CPU.
func (g *guest) halt() {
	close(g.stop)
	g.done.Wait()
}

func (g *guest) serve() {
	g.mu.Lock()
	defer g.mu.Unlock()
	defer g.cond.Broadcast()
	g.d.Acknowledge()
	for {
		address, _, ok := g.queues[queueTransmit].take()
		if !ok {
			break
		}
		g.queues[queueTransmit].slots = append(g.queues[queueTransmit].slots, address)
	}
	g.flush()
	rx := g.queues[queueReceive]
	for {
		address, n, ok := rx.take()
		if !ok {
			break
		}
		g.receive(g.d.Fetch(address, int(n)))
		rx.offer(address, rxBufferSize)
	}
	rx.Kick()
	if !g.ignoreEvents {
		g.handleEvents()
	}
}

func (g *guest) handleEvents() {
	q := g.queues[queueEvent]
	for {
		address, n, ok := q.take()
		if !ok {
			break
		}
		if n != eventSize || binary.LittleEndian.Uint32(g.d.Fetch(address, eventSize)) != eventTransportReset {
			g.t.Errorf("event of %d bytes: %x", n, g.d.Fetch(address, eventSize))
		}
		g.events++
		for p, s := range g.sockets {
			if s.state == guestConnected {
				s.fail(errGuestReset)
				delete(g.sockets, p)
			}
		}
		q.offer(address, eventSize)
	}
	q.Kick()
}

// transmit sends a packet as it is. mu is held.
func (g *guest) transmit(h header, data []byte) {
	var raw [headerSize]byte
	h.encode(&raw)
	g.out = append(g.out, append(raw[:], data...))
	g.flush()
}

func (g *guest) flush() {
	q := g.queues[queueTransmit]
	for len(g.out) > 0 && len(q.slots) > 0 {
		p, address := g.out[0], q.slots[len(q.slots)-1]
		g.out, q.slots = g.out[1:], q.slots[:len(q.slots)-1]
		g.d.Fill(address, p)
		buffers := []virtiotest.Buffer{{Address: address, Length: headerSize}}
		if len(p) > headerSize {
			buffers = append(buffers, virtiotest.Buffer{Address: address + headerSize, Length: uint32(len(p) - headerSize)})
		}
		q.buffers[uint32(q.Add(buffers...))] = address
	}
	q.Kick()
}

// receive follows a packet from the device.
func (g *guest) receive(p []byte) {
	if len(p) < headerSize {
		g.t.Errorf("packet of %d bytes", len(p))
		return
	}
	var h header
	h.decode((*[headerSize]byte)(p))
	data := p[headerSize:]
	g.packets[h.operation]++
	if h.destinationCID != g.cid || h.socketType != typeStream && h.operation != opReset || int(h.length) != len(data) || h.bufferSize != receiveBuffer && h.operation != opReset {
		g.t.Errorf("header %+v with %d bytes of data", h, len(data))
	}
	ports := portPair{host: h.sourcePort, guest: h.destinationPort}
	s := g.sockets[ports]
	switch {
	case s == nil && h.operation == opRequest && g.listeners[ports.guest] != nil:
		s = g.newSocket(ports, guestConnected)
		s.peer(&h)
		s.send(opResponse, 0, nil)
		g.listeners[ports.guest] <- s
	case s == nil && h.operation != opReset:
		g.transmit(h.reset(), nil)
	case s != nil:
		s.peer(&h)
		s.receive(&h, data)
	}
}

type guestState int

const (
	guestConnecting guestState = iota
	guestConnected
	guestGone
)

// guestSocket is a stream socket in the guest.
type guestSocket struct {
	g     *guest
	ports portPair
	state guestState
	err   error

	size       uint32
	queue      [][]byte
	used       uint32 // bytes of packets that are not read completely
	forwarded  uint32
	announced  uint32
	sent       uint32
	peerSize   uint32
	peerTaken  uint32
	peerClosed uint32 // shutdown flags of the host
	closed     uint32 // and of this side
}

func (g *guest) newSocket(p portPair, state guestState) *guestSocket {
	s := &guestSocket{g: g, ports: p, state: state, size: g.bufferSize}
	g.sockets[p] = s
	return s
}

func (s *guestSocket) peer(h *header) { s.peerSize, s.peerTaken = h.bufferSize, h.forwarded }

func (s *guestSocket) send(op operation, flags uint32, data []byte) {
	s.announced = s.forwarded
	s.sent += uint32(len(data))
	s.g.transmit(header{
		sourceCID: s.g.cid, destinationCID: HostCID, sourcePort: s.ports.guest, destinationPort: s.ports.host,
		length: uint32(len(data)), socketType: typeStream, operation: op, flags: flags, bufferSize: s.size, forwarded: s.forwarded,
	}, data)
}

func (s *guestSocket) fail(err error) {
	s.state, s.err = guestGone, err
	s.g.cond.Broadcast()
}

func (s *guestSocket) receive(h *header, data []byte) {
	switch h.operation {
	case opResponse:
		s.state = guestConnected
	case opReset:
		// As in Linux: what was received can still be read, then the end of file.
		if s.state == guestConnecting {
			s.err = errGuestReset
		}
		s.state, s.peerClosed = guestGone, shutdownBoth
		delete(s.g.sockets, s.ports)
	case opShutdown:
		s.peerClosed |= h.flags
		if s.peerClosed == shutdownBoth {
			if len(s.queue) == 0 {
				s.send(opReset, 0, nil)
				s.state = guestGone
			}
			delete(s.g.sockets, s.ports)
		}
	case opCreditRequest:
		s.send(opCreditUpdate, 0, nil)
	case opData:
		cost := uint32(len(s.queue)+1) * linuxPacketCost
		if cost+s.used+uint32(len(data)) > s.size {
			s.g.t.Errorf("socket %v: %d packets and %d bytes are more than its buffer of %d", s.ports, len(s.queue)+1, s.used+uint32(len(data)), s.size)
			s.send(opReset, 0, nil)
			s.fail(errGuestReset)
			delete(s.g.sockets, s.ports)
			return
		}
		if s.peerClosed&shutdownSend != 0 {
			s.g.t.Errorf("socket %v: data after shutdown", s.ports)
		}
		s.queue = append(s.queue, append([]byte(nil), data...))
		s.used += uint32(len(data))
	}
	s.g.cond.Broadcast()
}

// listen makes the guest accept connections to the port.
func (g *guest) listen(port uint32) chan *guestSocket {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := make(chan *guestSocket, 4096)
	g.listeners[port] = c
	return c
}

// connect opens a connection to the host.
func (g *guest) connect(port uint32) (*guestSocket, error) {
	s := g.startConnect(port)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wait(func() bool { return s.state != guestConnecting })
	return s, s.err
}

func (g *guest) startConnect(port uint32) *guestSocket {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.nextPort++
	s := g.newSocket(portPair{host: port, guest: g.nextPort}, guestConnecting)
	s.send(opRequest, 0, nil)
	return s
}

// wait blocks until the condition holds. mu is held.
func (g *guest) wait(condition func() bool) {
	late := false
	timer := time.AfterFunc(patience, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		late = true
		g.cond.Broadcast()
	})
	defer timer.Stop()
	for !condition() {
		if late {
			panic("guest: stuck")
		}
		g.cond.Wait()
	}
}

// Read follows recv(2) and Linux's rule for credit updates.
func (s *guestSocket) Read(p []byte) (int, error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.g.wait(func() bool { return len(s.queue) > 0 || s.state == guestGone || s.peerClosed&shutdownSend != 0 })
	if len(s.queue) == 0 {
		if s.err != nil {
			return 0, s.err
		}
		return 0, io.EOF
	}
	n := 0
	for n < len(p) && len(s.queue) > 0 {
		m := copy(p[n:], s.queue[0])
		n += m
		if s.queue[0] = s.queue[0][m:]; len(s.queue[0]) == 0 {
			s.queue = s.queue[1:]
		}
	}
	left := uint32(0)
	for _, q := range s.queue {
		left += uint32(len(q))
	}
	// The part of a packet that was read does not count until all of it was.
	s.forwarded += s.used - left
	s.used = left
	free := s.size - (s.forwarded - s.announced)
	if s.state == guestConnected && s.forwarded != s.announced && (free < maxPacketData || len(s.queue) == 0) {
		s.send(opCreditUpdate, 0, nil)
	}
	return n, nil
}

// Write follows send(2): it waits for credit and sends as much as there is.
func (s *guestSocket) Write(p []byte) (int, error) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	written := 0
	for written < len(p) {
		credit := func() uint32 { return s.peerSize - (s.sent - s.peerTaken) }
		s.g.wait(func() bool {
			return s.state == guestGone || s.peerClosed&shutdownReceive != 0 || credit() > 0 && len(s.g.out) < 64
		})
		if s.err != nil {
			return written, s.err
		}
		if s.state == guestGone || s.peerClosed&shutdownReceive != 0 || s.closed&shutdownSend != 0 {
			return written, errGuestPipe
		}
		n := min(len(p)-written, maxPacketData, int(credit()))
		s.send(opData, 0, p[written:written+n])
		written += n
	}
	return written, nil
}

func (s *guestSocket) shutdown(flags uint32) {
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.closed |= flags
	if s.state == guestConnected {
		s.send(opShutdown, flags, nil)
	}
}

func (s *guestSocket) CloseWrite() error {
	s.shutdown(shutdownSend)
	return nil
}

func (s *guestSocket) Close() error {
	s.shutdown(shutdownBoth)
	return nil
}
