package usernet

import (
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/forkvm/forkvm/devices/nic"
)

// packet makes a frame for the guest of what an IP packet carries.
func (n *Net) packet(protocol tcpip.TransportProtocolNumber, from, to netip.Addr, payload []byte) []byte {
	const ethernet = header.EthernetMinimumSize
	fields := header.EthernetFields{
		SrcAddr: tcpip.LinkAddress(nic.GatewayMAC[:]), DstAddr: tcpip.LinkAddress(n.config.Guest[:]), Type: networkProtocol(to),
	}
	size := header.IPv6MinimumSize
	if to.Is4() {
		size = header.IPv4MinimumSize
	}
	frame := make([]byte, ethernet+size, ethernet+size+len(payload))
	header.Ethernet(frame).Encode(&fields)
	if to.Is4() {
		ip := header.IPv4(frame[ethernet:])
		ip.Encode(&header.IPv4Fields{
			TotalLength: uint16(size + len(payload)), TTL: 64, Protocol: uint8(protocol), SrcAddr: address(from), DstAddr: address(to),
		})
		ip.SetChecksum(^ip.CalculateChecksum())
	} else {
		header.IPv6(frame[ethernet:]).Encode(&header.IPv6Fields{
			PayloadLength: uint16(len(payload)), TransportProtocol: protocol, HopLimit: 64, SrcAddr: address(from), DstAddr: address(to),
		})
	}
	return append(frame, payload...)
}

// echoReply makes the frame that answers an echo request.
func (n *Net) echoReply(e *echo, data []byte) []byte {
	if e.remote.Is4() {
		p := header.ICMPv4(make([]byte, header.ICMPv4MinimumSize, header.ICMPv4MinimumSize+len(data)))
		p.SetType(header.ICMPv4EchoReply)
		p.SetIdent(e.ident)
		p.SetSequence(e.sequence)
		p = append(p, data...)
		p.SetChecksum(^checksum.Checksum(p, 0))
		return n.packet(header.ICMPv4ProtocolNumber, e.remote, e.guest, p)
	}
	p := header.ICMPv6(make([]byte, header.ICMPv6MinimumSize+4, header.ICMPv6MinimumSize+4+len(data)))[:header.ICMPv6EchoMinimumSize]
	p.SetType(header.ICMPv6EchoReply)
	p.SetIdent(e.ident)
	p.SetSequence(e.sequence)
	p = append(p, data...)
	return n.icmp6(e.remote, e.guest, p)
}

// prohibited makes the frame that answers an IP packet that may not leave (RFC 1812, section 5.2.7.1; RFC 4443, section 3.1).
// It comes from the gateway, and quotes the beginning of the packet.
func (n *Net) prohibited(guest netip.Addr, packet []byte) []byte {
	if guest.Is4() {
		quoted := packet[:min(len(packet), 60+8)]
		p := header.ICMPv4(make([]byte, header.ICMPv4MinimumSize, header.ICMPv4MinimumSize+len(quoted)))
		p.SetType(header.ICMPv4DstUnreachable)
		p.SetCode(header.ICMPv4AdminProhibited)
		p = append(p, quoted...)
		p.SetChecksum(^checksum.Checksum(p, 0))
		return n.packet(header.ICMPv4ProtocolNumber, nic.Gateway4, guest, p)
	}
	quoted := packet[:min(len(packet), 512)]
	p := header.ICMPv6(make([]byte, 8, 8+len(quoted)))
	p.SetType(header.ICMPv6DstUnreachable)
	p.SetCode(header.ICMPv6Prohibited)
	return n.icmp6(nic.Gateway6, guest, append(p, quoted...))
}

func (n *Net) icmp6(from, to netip.Addr, p header.ICMPv6) []byte {
	p.SetChecksum(0)
	sum := header.PseudoHeaderChecksum(header.ICMPv6ProtocolNumber, address(from), address(to), uint16(len(p)))
	p.SetChecksum(^checksum.Checksum(p, sum))
	return n.packet(header.ICMPv6ProtocolNumber, from, to, p)
}

// address is an address as the stack has it.
func address(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// fromStack is the other way.
func fromStack(a tcpip.Address) netip.Addr {
	b, _ := netip.AddrFromSlice(a.AsSlice())
	return b
}
