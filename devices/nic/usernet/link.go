package usernet

import (
	"encoding/json"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/forkvm/forkvm/devices/nic"
)

// Bounds of what waits for the guest.
const (
	maxQueued      = 4096    // frames
	maxQueuedBytes = 8 << 20 // of their data
	maxSegmented   = 1 << 16 // bytes of a frame that the guest's card segments
)

// link is the stack's side of the wire: a stack.LinkEndpoint whose outbound packets wait for the guest's card.
type link struct {
	mtu        uint32
	segmenting atomic.Bool // the guest's card takes segments of TCP together
	// pace says whether the guest may have so many packets now.
	pace func(packets int) bool

	mu         sync.Mutex
	dispatcher stack.NetworkDispatcher
	wake       func()
	queue      []outbound
	bytes      int
	frame      []byte // what Next returned last
	ready      bool   // frame is of the queue's head
}

// outbound is a packet of the stack, or a frame of our own.
type outbound struct {
	packet *stack.PacketBuffer
	frame  []byte
}

func (o outbound) size() int {
	if o.packet != nil {
		return o.packet.Size()
	}
	return len(o.frame)
}

func newLink(mtu int, pace func(int) bool) *link {
	return &link{mtu: uint32(mtu), pace: pace, wake: func() {}}
}

// enqueue takes a frame for the guest, unless there is no room.
func (l *link) enqueue(o outbound) bool {
	l.mu.Lock()
	if len(l.queue) >= maxQueued || l.bytes > maxQueuedBytes {
		l.mu.Unlock()
		return false
	}
	l.queue = append(l.queue, o)
	l.bytes += o.size()
	wake := l.wake
	l.mu.Unlock()
	wake()
	return true
}

// next returns the frame at the head of the queue.
func (l *link) next() (nic.Frame, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return nic.Frame{}, false
	}
	head := l.queue[0]
	if head.packet == nil {
		return nic.Frame{Data: head.frame}, true
	}
	if !l.ready {
		l.frame = l.frame[:0]
		for _, part := range head.packet.AsSlices() {
			l.frame = append(l.frame, part...)
		}
		l.ready = true
	}
	return describe(l.frame, head.packet), true
}

// segments is how many packets the guest's card makes of one.
func segments(p *stack.PacketBuffer) int {
	if p.GSOOptions.Type == stack.GSONone || p.GSOOptions.MSS == 0 {
		return 1
	}
	return nic.Segments(p.Data().Size(), p.GSOOptions.MSS)
}

// describe says what the stack left undone in a packet.
func describe(data []byte, p *stack.PacketBuffer) nic.Frame {
	f := nic.Frame{Data: data}
	g := p.GSOOptions
	if g.Type == stack.GSONone || !g.NeedsCsum {
		return f
	}
	f.NeedsChecksum = true
	f.ChecksumStart = uint16(header.EthernetMinimumSize) + g.L3HdrLen
	f.ChecksumOffset = g.CsumOffset
	headers := int(f.ChecksumStart) + len(p.TransportHeader().Slice())
	if g.MSS == 0 || len(data)-headers <= int(g.MSS) {
		return f
	}
	f.Segmentation = nic.TCPv4
	if g.Type == stack.GSOTCPv6 {
		f.Segmentation = nic.TCPv6
	}
	f.SegmentSize, f.HeaderLength = g.MSS, uint16(headers)
	return f
}

// taken removes the head of the queue.
func (l *link) taken() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) > 0 {
		l.removeLocked()
	}
}

func (l *link) removeLocked() {
	head := l.queue[0]
	l.queue[0] = outbound{}
	l.queue = l.queue[1:]
	if len(l.queue) == 0 {
		l.queue = nil
	}
	l.bytes -= head.size()
	l.ready = false
	if head.packet != nil {
		head.packet.DecRef()
	}
}

// drop empties the queue.
func (l *link) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) > 0 {
		l.removeLocked()
	}
}

// inject gives the stack a frame of the guest.
func (l *link) inject(data []byte) {
	l.mu.Lock()
	d := l.dispatcher
	l.mu.Unlock()
	if d == nil {
		return
	}
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(data)})
	defer p.DecRef()
	if !l.ParseHeader(p) {
		return
	}
	p.NetworkProtocolNumber = header.Ethernet(p.LinkHeader().Slice()).Type()
	d.DeliverNetworkPacket(p.NetworkProtocolNumber, p)
}

// What follows implements stack.LinkEndpoint and stack.GSOEndpoint.

func (l *link) MTU() uint32                      { return l.mtu }
func (l *link) SetMTU(uint32)                    {}
func (l *link) MaxHeaderLength() uint16          { return header.EthernetMinimumSize }
func (l *link) LinkAddress() tcpip.LinkAddress   { return tcpip.LinkAddress(nic.GatewayMAC[:]) }
func (l *link) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities: the guest's checksums are its own business, which ends here.
func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload | stack.CapabilityResolutionRequired
}

func (l *link) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dispatcher = d
}

func (l *link) IsAttached() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dispatcher != nil
}

func (l *link) Wait()                                   {}
func (l *link) Close()                                  {}
func (l *link) SetOnCloseAction(func())                 {}
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }
func (l *link) GSOMaxSize() uint32                      { return maxSegmented - 1024 }

func (l *link) SupportedGSO() stack.SupportedGSO {
	if l.segmenting.Load() {
		return stack.HostGSOSupported
	}
	return stack.GSONotSupported
}

func (l *link) AddHeader(p *stack.PacketBuffer) {
	header.Ethernet(p.LinkHeader().Push(header.EthernetMinimumSize)).Encode(&header.EthernetFields{
		SrcAddr: p.EgressRoute.LocalLinkAddress,
		DstAddr: p.EgressRoute.RemoteLinkAddress,
		Type:    p.NetworkProtocolNumber,
	})
}

func (l *link) ParseHeader(p *stack.PacketBuffer) bool {
	_, ok := p.LinkHeader().Consume(header.EthernetMinimumSize)
	return ok
}

func (l *link) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	for i, p := range list.AsSlice() {
		if p.NetworkProtocolNumber != header.ARPProtocolNumber && !l.pace(segments(p)) {
			continue // lost on the way
		}
		if !l.enqueue(outbound{packet: p.IncRef()}) {
			p.DecRef()
			return i, &tcpip.ErrNoBufferSpace{}
		}
	}
	return list.Len(), nil
}

// What follows implements nic.Backend.

// Attach implements nic.Backend.
func (n *Net) Attach(wake func()) {
	n.link.mu.Lock()
	defer n.link.mu.Unlock()
	n.link.wake = wake
}

// SetOffloads implements nic.Backend. Connections that are there keep what they have: a driver that takes less than the one
// before it has forgotten them.
func (n *Net) SetOffloads(o nic.Offloads) { n.link.segmenting.Store(o.TCP4 && o.TCP6) }

// Next implements nic.Backend.
func (n *Net) Next() (nic.Frame, bool) { return n.link.next() }

// Taken implements nic.Backend.
func (n *Net) Taken() { n.link.taken() }

// Save implements nic.Backend.
func (n *Net) Save() (json.RawMessage, error) {
	flows := n.ending.Flows()
	n.relays.each(func(r *relay) {
		if f, ok := r.known(); ok {
			flows = append(flows, f)
		}
	})
	return nic.EncodeFlows(flows)
}

// Restore implements nic.Backend.
func (n *Net) Restore(data json.RawMessage) error {
	flows, err := nic.DecodeFlows(data)
	if err != nil {
		return err
	}
	n.forget()
	n.ending.Set(flows)
	n.link.drop()
	n.pins.clear()
	return nil
}

// forget ends everything that the guest has open, and what the stack still remembers of it: a guest that was put back opens its
// next connection from a port that it has used in another life.
func (n *Net) forget() {
	n.relays.reset(n.life)
	n.udp.each((*session).close)
	s := n.gateway.stack.Load()
	if s == nil {
		return
	}
	for _, e := range s.RegisteredEndpoints() {
		if e, ok := e.(*tcp.Endpoint); ok && e.EndpointState() != tcp.StateListen {
			e.Abort()
		}
	}
}

// Renewed is called when the guest has its own addresses: what it had open before can be ended.
func (n *Net) Renewed() { n.ending.Begin() }

func (n *Net) probe(frames [][]byte) {
	for _, f := range frames {
		n.link.enqueue(outbound{frame: f})
	}
}
