package usernet

import (
	"encoding/binary"
	"net/netip"
	"sync/atomic"

	"github.com/forkvm/forkvm/devices/nic"
)

// Class is what the filter makes of a frame.
type Class uint8

// The classes. Only the first two reach the stack.
const (
	ClassPacket    Class = iota // TCP, UDP, ICMP to the gateway, or a fragment of such
	ClassNeighbour              // who has the gateway's address?
	ClassEcho                   // an echo request to somebody else
	ClassAddress                // where am I? (DHCP)
	ClassRefused                // answered with an ICMP error: no protocol for us
	ClassQuiet                  // what every station says now and then and nobody here hears: multicast, its own addresses
	ClassShort                  // ends within its headers, or says that it is longer than it is
	ClassEtherType              // neither IP nor ARP: VLAN tags, …
	ClassStation                // from another card, or to one
	ClassSource                 // from an address that is not the guest's
	ClassForged                 // ARP, neighbour and router messages that only others may send
	ClassOptions                // IP options: source routes and the like; headers of IPv6 beside fragments
	ClassFragment               // of an ICMP message
	ClassExcess                 // more packets than the guest may have in this time, either way
	classes
)

func (c Class) String() string {
	return [classes]string{
		"packet", "neighbour", "echo", "address", "refused", "quiet", "short", "ether_type", "station", "source", "forged", "options", "fragment", "excess",
	}[c]
}

const (
	etherIPv4 = 0x0800
	etherARP  = 0x0806
	etherIPv6 = 0x86dd

	protocolICMP     = 1
	protocolTCP      = 6
	protocolUDP      = 17
	protocolFragment = 44
	protocolICMP6    = 58

	ethernetSize = 14
	ipv4Size     = 20
	ipv6Size     = 40
	echoSize     = 8
)

// filter looks at the guest's frames before the stack does.
type filter struct {
	guest  nic.MAC
	counts [classes]atomic.Uint64
}

func newFilter(guest nic.MAC) filter { return filter{guest: guest} }

// echo is an echo request.
type echo struct {
	guest, remote   netip.Addr
	ident, sequence uint16
	data            []byte
}

// verdict is what a frame is: its class, addresses if there are some, the IP packet, and the request of ClassEcho.
type verdict struct {
	class     Class
	guest, to netip.Addr
	packet    []byte
	// protocol is what an IP packet carries, port where TCP or UDP would go; 0 if there is nothing to be seen of it.
	protocol byte
	port     uint16
	echo     echo
}

// classify says what a frame is. It reads nothing behind the frame's end, whatever the frame says of itself.
func (f *filter) classify(frame []byte) verdict {
	if len(frame) < ethernetSize {
		return verdict{class: ClassShort}
	}
	if nic.MAC(frame[6:12]) != f.guest {
		return verdict{class: ClassStation}
	}
	to := nic.MAC(frame[0:6])
	group := to[0]&1 != 0
	if !group && to != nic.GatewayMAC {
		return verdict{class: ClassStation}
	}
	packet := frame[ethernetSize:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case etherARP:
		return f.arp(packet)
	case etherIPv4:
		return ipv4Class(packet, group)
	case etherIPv6:
		return ipv6Class(packet, group)
	}
	return verdict{class: ClassEtherType}
}

// arp looks at the address resolution protocol (RFC 826).
func (f *filter) arp(p []byte) verdict {
	if len(p) < 28 {
		return verdict{class: ClassShort}
	}
	sender, target := netip.AddrFrom4([4]byte(p[14:18])), netip.AddrFrom4([4]byte(p[24:28]))
	v := verdict{class: ClassNeighbour, guest: sender, to: target}
	switch {
	// Ethernet and IPv4, with the lengths of their addresses.
	case [6]byte(p[:6]) != [6]byte{0, 1, 8, 0, 6, 4} || nic.MAC(p[8:14]) != f.guest:
		v.class = ClassForged
	case sender != nic.Guest4 && !sender.IsUnspecified():
		v.class = ClassForged
	case binary.BigEndian.Uint16(p[6:]) != 1 || target != nic.Gateway4 && target != nic.Resolver4:
		v.class = ClassQuiet // it says where it is, or looks whether it is alone
	}
	return v
}

// ipv4Class looks at a packet of IPv4.
func ipv4Class(p []byte, group bool) verdict {
	if len(p) < ipv4Size || p[0]>>4 != 4 {
		return verdict{class: ClassShort}
	}
	size, total := int(p[0]&15)*4, int(binary.BigEndian.Uint16(p[2:]))
	if size < ipv4Size || total < size || total > len(p) {
		return verdict{class: ClassShort}
	}
	from, to := netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
	v := verdict{guest: from, to: to, packet: p[:total]}
	fragment := binary.BigEndian.Uint16(p[6:])&0x3fff != 0 // more to come, or not the first
	v.carries(p[9], p[size:total], binary.BigEndian.Uint16(p[6:])&0x1fff == 0)
	switch {
	case size == ipv4Size && isDHCP(from, to, p[9], fragment, p[size:total]):
		v.class = ClassAddress
	case group || to.IsMulticast():
		v.class = ClassQuiet
	case from != nic.Guest4:
		v.class = ClassSource
	case size > ipv4Size:
		v.class = ClassOptions
	default:
		v.classify(p[9], protocolICMP, 8, p[ipv4Size:total], fragment, to, nic.Gateway4, nic.Resolver4)
	}
	return v
}

// ipv6Class looks at a packet of IPv6.
func ipv6Class(p []byte, group bool) verdict {
	if len(p) < ipv6Size || p[0]>>4 != 6 {
		return verdict{class: ClassShort}
	}
	total := ipv6Size + int(binary.BigEndian.Uint16(p[4:]))
	if total > len(p) {
		return verdict{class: ClassShort}
	}
	from, to := netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	v := verdict{guest: from, to: to, packet: p[:total]}
	next, payload := p[6], p[ipv6Size:total]
	v.carries(next, payload, true)
	own := from == nic.Guest6 || from.IsLinkLocalUnicast() || from.IsUnspecified()
	switch {
	case next == protocolICMP6 && len(payload) > 0 && payload[0] >= 133 && payload[0] <= 137:
		v.class = neighbourClass(payload, own)
	case group || to.IsMulticast():
		v.class = ClassQuiet
	case from != nic.Guest6:
		v.class = ClassSource
	default:
		fragment := next == protocolFragment
		if fragment {
			if len(payload) < 8 {
				v.class = ClassShort
				return v
			}
			next = payload[0]
			v.protocol = next
		}
		v.classify(next, protocolICMP6, 128, payload, fragment, to, nic.Gateway6, nic.Resolver6)
		if v.class == ClassRefused && extension(next) {
			v.class = ClassOptions
		}
	}
	return v
}

// neighbourClass looks at neighbour discovery (RFC 4861). The gateway needs none of it but to be found.
func neighbourClass(p []byte, own bool) Class {
	switch {
	case p[0] == 134 || p[0] == 137: // a router's
		return ClassForged
	case !own:
		return ClassSource
	case p[0] == 133: // is there a router?
		return ClassQuiet
	case len(p) < 24:
		return ClassShort
	}
	target := netip.AddrFrom16([16]byte(p[8:24]))
	ours := target == nic.Gateway6 || target == nic.Resolver6
	switch {
	case p[0] == 136 && ours:
		return ClassForged
	case p[0] == 136 || !ours:
		return ClassQuiet
	}
	return ClassNeighbour
}

// carries notes what a packet carries, and the port that it goes to if the packet has the beginning of it.
func (v *verdict) carries(protocol byte, payload []byte, beginning bool) {
	v.protocol = protocol
	if (protocol == protocolTCP || protocol == protocolUDP) && beginning && len(payload) >= 4 {
		v.port = binary.BigEndian.Uint16(payload[2:])
	}
}

// classify looks at what a packet carries: control is the protocol of ICMP, request its type of an echo request.
func (v *verdict) classify(protocol, control, request byte, payload []byte, fragment bool, to netip.Addr, ours ...netip.Addr) {
	switch {
	case protocol == protocolTCP || protocol == protocolUDP:
		v.class = ClassPacket
	case protocol != control:
		v.class = ClassRefused
	case to == ours[0] || to == ours[1]:
		v.class = ClassPacket
	case fragment:
		v.class = ClassFragment
	case len(payload) < echoSize:
		v.class = ClassShort
	case payload[0] != request || payload[1] != 0:
		v.class = ClassQuiet // errors about what came from outside end here
	default:
		v.class = ClassEcho
		v.echo = echo{
			guest: v.guest, remote: to,
			ident: binary.BigEndian.Uint16(payload[4:]), sequence: binary.BigEndian.Uint16(payload[6:]), data: payload[echoSize:],
		}
	}
}

// extension says whether a protocol is an extension header of IPv6 (IANA's list).
func extension(protocol byte) bool {
	switch protocol {
	case 0, 43, protocolFragment, 50, 51, 60, 135, 139, 140, 253, 254:
		return true
	}
	return false
}

// Send implements nic.Backend.
func (n *Net) Send(f nic.Frame) {
	v := n.filter.classify(f.Data)
	if (v.class == ClassPacket || v.class == ClassEcho) && !n.keepsPace(&n.meters.packetsSent, f.Segments()) {
		return
	}
	n.filter.counts[v.class].Add(1)
	n.refused.noteFrame(f.Data, &v)
	switch v.class {
	case ClassPacket, ClassNeighbour:
		if n.reach() != nil {
			n.link.inject(f.Data)
		}
	case ClassEcho:
		n.ping(&v)
	case ClassAddress:
		n.dhcp(v.packet[ipv4Size+8:])
	case ClassRefused, ClassOptions, ClassFragment:
		n.link.enqueue(outbound{frame: n.prohibited(v.guest, v.packet)})
	}
}

// Frames says how many frames of the guest were of each class.
func (n *Net) Frames() map[string]uint64 {
	counts := map[string]uint64{}
	for c := range classes {
		if k := n.filter.counts[c].Load(); k > 0 {
			counts[c.String()] = k
		}
	}
	return counts
}
