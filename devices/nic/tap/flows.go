package tap

import (
	"encoding/binary"
	"net/netip"

	"github.com/forkvm/forkvm/devices/nic"
)

const (
	ethernetSize = 14
	etherIPv4    = 0x0800
	etherIPv6    = 0x86dd
	ipv4Size     = 20
	ipv6Size     = 40
	protocolTCP  = 6
	tcpSize      = 20

	flagFIN = 0x01
	flagSYN = 0x02
	flagRST = 0x04
	flagACK = 0x10
)

// flows are the connections that the guest has opened, and how much of each has ended. Only segments that begin or end one are
// looked at; those of options and extension headers are none.
type flows map[nic.Flow]ends

// ends says who has sent the end.
type ends uint8

const (
	endOfGuest ends = 1 << iota
	endOfRemote
)

func (f flows) list() (all []nic.Flow) {
	for flow := range f {
		all = append(all, flow)
	}
	return all
}

// note looks at a segment.
func (f flows) note(flow nic.Flow, flags byte, sent bool) {
	switch {
	case flags&flagRST != 0:
		delete(f, flow)
	case flags&(flagSYN|flagACK) == flagSYN|flagACK && !sent:
		f.begin(flow)
	case flags&flagFIN != 0:
		e, ok := f[flow]
		if !ok {
			return
		}
		if sent {
			e |= endOfGuest
		} else {
			e |= endOfRemote
		}
		if f[flow] = e; e == endOfGuest|endOfRemote {
			delete(f, flow)
		}
	}
}

// begin notes a connection when its far end has answered: one that nobody answers has nothing that could be ended. If there are
// too many, one that has ended silently, or any other, makes room.
func (f flows) begin(flow nic.Flow) {
	if len(f) >= nic.MaxFlows {
		for other := range f {
			delete(f, other)
			break
		}
	}
	f[flow] = 0
}

// track looks at a frame, which is of the guest or for it. It reads nothing behind the frame's end.
func (n *Net) track(frame []byte, sent bool) {
	source, destination, segment := tcpOf(frame)
	if segment == nil || segment[13]&(flagFIN|flagSYN|flagRST) == 0 {
		return
	}
	if !sent {
		source, destination = destination, source
	}
	local, remote := binary.BigEndian.Uint16(segment), binary.BigEndian.Uint16(segment[2:])
	if !sent {
		local, remote = remote, local
	}
	if source != nic.Guest4 && source != nic.Guest6 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.flows.note(nic.Flow{Guest: netip.AddrPortFrom(source, local), Remote: netip.AddrPortFrom(destination, remote)}, segment[13], sent)
}

// tcpOf finds a segment in a frame, nil if there is none.
func tcpOf(frame []byte) (source, destination netip.Addr, segment []byte) {
	if len(frame) < ethernetSize+ipv4Size+tcpSize {
		return source, destination, nil
	}
	p := frame[ethernetSize:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case etherIPv4:
		// The first of its fragments, without options.
		if p[0] != 0x45 || p[9] != protocolTCP || binary.BigEndian.Uint16(p[6:])&0x1fff != 0 {
			return source, destination, nil
		}
		return netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20])), p[ipv4Size:]
	case etherIPv6:
		if len(p) < ipv6Size+tcpSize || p[0]>>4 != 6 || p[6] != protocolTCP {
			return source, destination, nil
		}
		return netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40])), p[ipv6Size:]
	}
	return source, destination, nil
}
