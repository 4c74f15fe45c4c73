package vsock

import (
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
)

const (
	// maxReplies bounds the resets that wait for a buffer of the guest. At the bound the guest's packets stay in its ring,
	// as 5.10.6.1 has it.
	maxReplies = 1024
	// firstPort is where the host's ports for connections to the guest begin, out of the way of services.
	firstPort = 1 << 30
	// Starved connections ask for credit again after this time, which doubles while it does not help.
	minAskInterval = 20 * time.Millisecond
	maxAskInterval = 500 * time.Millisecond
)

// notes are what other goroutines have to say about a connection.
type notes uint8

const (
	noteNew notes = 1 << iota
	noteDialed
	noteReadable
	noteWritable
)

// router is the device behind the transport: it knows the connections and moves packets between them and the queues.
type router struct {
	id   string
	host *host
	wake func() // Transport.Wake

	// work is held by the transport's calls and by close. It is here for a driver that resets the device while it is closed.
	work     sync.Mutex
	guestCID uint64
	queues   []*virtio.Queue // nil while inactive
	table    map[portPair]*connection
	nextPort uint32
	// runQueue has the connections that may have a packet for the guest, in turn.
	runQueue []*connection
	replies  []header
	// held: packets of the guest were left in the ring because of maxReplies.
	held    bool
	starved map[*connection]struct{}
	ask     askTimer
	restart restart
	saved   devices.Remembered[state]

	mu     sync.Mutex // guards what follows, and the notes of connections
	active bool       // a driver runs the device: new connections can be posted
	inbox  []*connection
	timers struct{ ask, restart bool } // fired
}

// askTimer repeats credit requests.
type askTimer struct {
	timer    *time.Timer
	interval time.Duration
}

func newRouter(id string, guestCID uint32, h *host) *router {
	return &router{
		id:       id,
		host:     h,
		guestCID: uint64(guestCID),
		table:    make(map[portPair]*connection),
		nextPort: firstPort,
		starved:  make(map[*connection]struct{}),
		wake:     func() {},
	}
}

// Activate implements virtio.Device.
func (r *router) Activate(_ uint64, queues []*virtio.Queue) error {
	r.work.Lock()
	defer r.work.Unlock()
	r.queues = queues
	r.restart.activate()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.active = true
	return nil
}

// Reset implements virtio.Device: the driver has forgotten all connections.
func (r *router) Reset() {
	r.work.Lock()
	defer r.work.Unlock()
	r.forgetAll()
}

// forgetAll ends all connections without a word to the guest. What it sent is still written to the host.
func (r *router) forgetAll() {
	r.mu.Lock()
	r.active = false
	inbox := r.inbox
	r.inbox = nil
	for _, c := range inbox {
		c.notes = 0
	}
	r.mu.Unlock()
	for _, c := range inbox {
		if c.phase == phaseRequesting {
			r.detach(c)
		}
	}
	for _, c := range r.table {
		r.detach(c)
	}
	r.queues, r.runQueue, r.replies, r.held = nil, nil, nil, false
	r.stopTimersLocked()
	r.restart = restart{}
}

func (r *router) close() {
	r.work.Lock()
	defer r.work.Unlock()
	r.forgetAll()
}

// note tells the router about a connection from any goroutine. It reports false for a new connection that comes when no
// driver is there; other notes are only of use while one is.
func (r *router) note(c *connection, n notes) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.active {
		return false
	}
	if c.notes == 0 {
		r.inbox = append(r.inbox, c)
	}
	c.notes |= n
	r.wake()
	return true
}

// noteTimer is note for a timer.
func (r *router) noteTimer(fired *bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*fired = true
	r.wake()
}

// HandleWake implements virtio.Device.
func (r *router) HandleWake() error {
	r.work.Lock()
	defer r.work.Unlock()
	return r.settle(r.handleWake())
}

// settle lets go of everything when the driver broke the rules: until it resets the device nothing can reach the guest, and
// host programs had better know.
func (r *router) settle(err error) error {
	if err != nil {
		r.forgetAll()
	}
	return err
}

func (r *router) handleWake() error {
	r.mu.Lock()
	inbox, fired := r.inbox, r.timers
	r.inbox = nil
	r.timers.ask, r.timers.restart = false, false
	taken := make([]notes, len(inbox))
	for i, c := range inbox {
		taken[i], c.notes = c.notes, 0
	}
	r.mu.Unlock()

	for i, c := range inbox {
		r.follow(c, taken[i])
	}
	if fired.ask {
		r.askAgain()
	}
	if err := r.restart.serve(r, fired.restart); err != nil {
		return err
	}
	if r.held {
		return r.serveTransmit()
	}
	return r.serveReceive()
}

// HandleQueue implements virtio.Device.
func (r *router) HandleQueue(index int) error {
	r.work.Lock()
	defer r.work.Unlock()
	return r.settle(r.handleQueue(index))
}

func (r *router) handleQueue(index int) error {
	switch index {
	case queueTransmit:
		return r.serveTransmit()
	case queueEvent:
		if err := r.restart.serve(r, false); err != nil {
			return err
		}
	}
	return r.serveReceive()
}

// follow acts on notes about a connection.
func (r *router) follow(c *connection, n notes) {
	if n&noteNew != 0 {
		r.request(c)
	}
	if n&noteDialed != 0 {
		r.dialed(c)
	}
	if n&noteReadable != 0 && c.phase != phaseGone {
		c.handleReadable()
	}
	if n&noteWritable != 0 && c.phase != phaseGone {
		c.handleWritable()
	}
	r.enqueue(c)
}

// request begins a connection that a host program asked for.
func (r *router) request(c *connection) {
	for {
		c.ports.host = r.nextPort
		if r.nextPort++; r.nextPort == 0xffffffff {
			r.nextPort = firstPort
		}
		if _, taken := r.table[c.ports]; !taken {
			break
		}
	}
	r.table[c.ports] = c
	c.want |= wantRequest
	c.eager = slices.Contains(r.host.eager, c.ports.guest)
	if c.stream.readable() { // most clients have said something already
		c.handleReadable()
	} else {
		c.waitRead() // for a client that gives up
	}
}

// abandon ends a connection whose host program gave up before the guest answered.
func (r *router) abandon(c *connection) {
	if c.requested {
		r.reply(r.resetFor(c.ports))
	}
	r.detach(c)
}

// dialed follows the end of DialHost.
func (r *router) dialed(c *connection) {
	if c.phase != phaseDialing {
		return // host.finish has closed what was dialled
	}
	conn, err := r.host.takeDialed(c)
	if err == nil {
		c.stream, err = newStream(conn)
		if err != nil {
			_ = conn.Close()
		}
	}
	if err != nil {
		r.kill(c)
		return
	}
	c.phase = phaseAnswering
}

// enqueue gives a connection its turn if it has a packet.
func (r *router) enqueue(c *connection) {
	if !c.queued && c.ready() {
		c.queued = true
		r.runQueue = append(r.runQueue, c)
	}
}

// nextReady returns the connection whose turn it is, which stays in front of the queue until turn.
func (r *router) nextReady() *connection {
	for len(r.runQueue) > 0 {
		c := r.runQueue[0]
		if c.ready() {
			return c
		}
		c.queued = false
		r.runQueue = r.runQueue[1:]
	}
	r.runQueue = nil
	return nil
}

// turn puts the connection in front behind the others, or out if it has no more.
func (r *router) turn(c *connection) {
	c.queued = false
	r.runQueue = r.runQueue[1:]
	r.enqueue(c)
}

// serveReceive sends what is due as long as the guest has buffers.
func (r *router) serveReceive() error {
	// Until the guest has handled the announced reset it would close new connections with the old ones.
	if r.restart.holding() {
		return nil
	}
	queue := r.queues[queueReceive]
	for {
		var c *connection
		if len(r.replies) == 0 {
			if c = r.nextReady(); c == nil {
				return nil
			}
		}
		chain, err := queue.Pop()
		if chain == nil || err != nil {
			return err
		}
		if err := r.fill(queue, chain, c); err != nil {
			return err
		}
		if r.held && len(r.replies) < maxReplies/2 {
			r.wake()
		}
	}
}

// fill sends one packet in the chain: of the connection, or a reply if that is nil.
func (r *router) fill(queue *virtio.Queue, chain *virtio.Chain, c *connection) error {
	switch {
	case chain.WritableLen() < headerSize:
		return queue.Push(chain, 0)
	case c == nil:
		if err := writeHeader(chain, &r.replies[0]); err != nil {
			return pushFailed(queue, chain, err)
		}
		if r.replies = r.replies[1:]; len(r.replies) == 0 {
			r.replies = nil
		}
		return queue.Push(chain, headerSize)
	}
	written, sent, err := c.emit(chain)
	switch {
	case err != nil:
		return pushFailed(queue, chain, err)
	case !sent:
		queue.Undo(chain)
	default:
		err = queue.Push(chain, written)
	}
	r.turn(c)
	return err
}

// pushFailed gives the chain back although err ends the device's work.
func pushFailed(queue *virtio.Queue, chain *virtio.Chain, err error) error {
	_ = queue.Push(chain, 0)
	return err
}

// serveTransmit takes the guest's packets, and sends what they lead to.
func (r *router) serveTransmit() error {
	queue := r.queues[queueTransmit]
	for {
		for len(r.replies) < maxReplies {
			chain, err := queue.Pop()
			if err != nil {
				return err
			}
			if chain == nil {
				r.held = false
				return r.serveReceive()
			}
			err = r.packet(chain)
			if e := queue.Push(chain, 0); err == nil {
				err = e
			}
			if err != nil {
				return err
			}
		}
		if err := r.serveReceive(); err != nil {
			return err
		}
		if len(r.replies) >= maxReplies {
			r.held = true
			return nil
		}
	}
}

// packet follows one packet from the guest. An error is one of guest memory; everything else that may be wrong with a
// packet concerns its connection, or nobody.
func (r *router) packet(chain *virtio.Chain) error {
	if chain.ReadableLen() < headerSize {
		return nil
	}
	var raw [headerSize]byte
	if err := chain.ReadAt(raw[:], 0); err != nil {
		return err
	}
	var h header
	h.decode(&raw)
	if h.sourceCID != r.guestCID {
		return nil // a forged sender gets no answer
	}
	var c *connection
	if h.destinationCID == HostCID && h.socketType == typeStream {
		c = r.table[portPair{host: h.destinationPort, guest: h.sourcePort}]
	}
	if c == nil {
		r.strange(&h)
		return nil
	}
	c.credit.update(h.bufferSize, h.forwarded)
	if c.starved && c.credit.available() > 0 {
		delete(r.starved, c)
		c.starved = false
		r.ask.interval = 0
	}
	err := r.deliver(c, &h, chain)
	r.enqueue(c)
	return err
}

// strange follows a packet that belongs to no connection: it may begin one.
func (r *router) strange(h *header) {
	if h.operation == opReset {
		return
	}
	if h.operation != opRequest || h.destinationCID != HostCID || h.socketType != typeStream {
		r.reply(h.reset())
		return
	}
	c := &connection{router: r, ports: portPair{host: h.destinationPort, guest: h.sourcePort}, phase: phaseDialing}
	c.credit.update(h.bufferSize, h.forwarded)
	if !r.host.dial(c) {
		r.reply(h.reset())
		return
	}
	r.table[c.ports] = c
}

// deliver follows a packet on a connection. What does not fit its phase ends it.
func (r *router) deliver(c *connection, h *header, chain *virtio.Chain) error {
	open := c.phase == phaseOpen
	switch {
	case h.operation == opReset:
		r.detach(c)
	case h.operation == opResponse && c.phase == phaseRequesting && c.requested:
		c.opened()
	case h.operation == opCreditUpdate && c.phase != phaseRequesting:
		// Its numbers have been taken.
	case h.operation == opCreditRequest && open:
		c.want |= wantCreditUpdate
	case h.operation == opShutdown && open && h.flags&shutdownBoth|c.guestDone == shutdownBoth:
		// The guest is done with it. Its last bytes may still be on their way to the host, which need not concern it.
		r.reply(r.resetFor(c.ports))
		r.detach(c)
	case h.operation == opShutdown && open:
		c.guestShutdown(h.flags & shutdownBoth)
	case h.operation == opData && open && r.acceptable(c, h, chain):
		return c.data(chain, h.length)
	default:
		r.kill(c)
	}
	return nil
}

// acceptable reports whether the data of a packet is there, and within what the guest may send.
func (r *router) acceptable(c *connection, h *header, chain *virtio.Chain) bool {
	return uint64(h.length) <= chain.ReadableLen()-headerSize &&
		uint64(len(c.pending)-c.uncounted)+uint64(h.length) <= receiveBuffer &&
		c.guestDone&shutdownSend == 0
}

func (r *router) reply(h header) { r.replies = append(r.replies, h) }

func (r *router) resetFor(p portPair) header {
	return header{
		sourceCID:       HostCID,
		destinationCID:  r.guestCID,
		sourcePort:      p.host,
		destinationPort: p.guest,
		socketType:      typeStream,
		operation:       opReset,
	}
}

// kill ends a connection for both sides.
func (r *router) kill(c *connection) {
	r.reply(r.resetFor(c.ports))
	r.detach(c)
}

// detach takes a connection out of the guest's sight. The host side writes the rest of the guest's data and closes.
func (r *router) detach(c *connection) {
	if r.table[c.ports] == c {
		delete(r.table, c.ports)
	}
	delete(r.starved, c)
	c.starved = false
	if c.answer != nil {
		c.answer <- ErrRefused
		c.answer = nil
	}
	rest := c.pending
	if c.phase != phaseOpen || c.deaf {
		rest = nil
	}
	c.pending = nil
	c.phase = phaseGone
	r.host.finish(c, rest)
}

// starve makes a connection ask for credit, now and then.
func (r *router) starve(c *connection) {
	if c.starved {
		return
	}
	c.starved = true
	c.want |= wantCreditRequest
	r.starved[c] = struct{}{}
	r.startAskTimer()
}

// askAgain repeats the requests. It is needed because the credit that is missing may be one that the guest does not know of,
// for packets instead of bytes; then it sends no update by itself.
func (r *router) askAgain() {
	r.ask.timer = nil
	for c := range r.starved {
		c.want |= wantCreditRequest
		r.enqueue(c)
	}
	if len(r.starved) > 0 {
		r.startAskTimer()
	} else {
		r.ask.interval = 0
	}
}

func (r *router) startAskTimer() {
	if r.ask.timer != nil {
		return
	}
	r.ask.interval = min(max(2*r.ask.interval, minAskInterval), maxAskInterval)
	r.ask.timer = time.AfterFunc(r.ask.interval, func() { r.noteTimer(&r.timers.ask) })
}

// stopTimers is for a paused device: time that the guest does not see must not count.
func (r *router) stopTimers() {
	r.work.Lock()
	defer r.work.Unlock()
	r.stopTimersLocked()
	if len(r.starved) > 0 {
		r.noteTimer(&r.timers.ask) // handled after Resume
	}
}

func (r *router) stopTimersLocked() {
	if r.ask.timer != nil {
		r.ask.timer.Stop()
		r.ask.timer = nil
	}
	r.restart.stopTimer()
	r.mu.Lock()
	r.timers.ask, r.timers.restart = false, false
	r.mu.Unlock()
}
