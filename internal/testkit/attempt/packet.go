package attempt

import (
	"encoding/binary"
	"net/netip"
)

// To makes a frame to the gateway of an IP packet.
func To(packet []byte) Frame {
	f := Frame{Source: Own, Destination: Gateway, Type: etherIPv4, Payload: packet}
	if len(packet) > 0 && packet[0]>>4 == 6 {
		f.Type = etherIPv6
	}
	return f
}

// Packet is an IP packet to be made. Its zero fields are the usual.
type Packet struct {
	From, To string
	Protocol byte
	Payload  []byte
	// Options of IPv4 are padded to words. Fragment is the word with flags and offset.
	Options  []byte
	Fragment uint16
}

// Encode makes the packet, with a right checksum.
func (p Packet) Encode() []byte {
	from, to := netip.MustParseAddr(p.From), netip.MustParseAddr(p.To)
	if to.Is6() {
		b := append([]byte{0x60, 0, 0, 0}, byte(len(p.Payload)>>8), byte(len(p.Payload)), p.Protocol, 64)
		b = append(append(b, from.AsSlice()...), to.AsSlice()...)
		return append(b, p.Payload...)
	}
	options := p.Options
	for len(options)%4 != 0 {
		options = append(options, 0)
	}
	size := 20 + len(options)
	b := make([]byte, 20, size+len(p.Payload))
	b[0], b[8], b[9] = 0x40|byte(size/4), 64, p.Protocol
	binary.BigEndian.PutUint16(b[2:], uint16(size+len(p.Payload)))
	binary.BigEndian.PutUint16(b[4:], 0x4242)
	binary.BigEndian.PutUint16(b[6:], p.Fragment)
	copy(b[12:], from.AsSlice())
	copy(b[16:], to.AsSlice())
	b = append(b, options...)
	binary.BigEndian.PutUint16(b[10:], ^sum(b, 0))
	return append(b, p.Payload...)
}

// Segment makes a TCP segment between two addresses.
func Segment(from, to string, port uint16, flags byte, data ...byte) []byte {
	b := make([]byte, 20, 20+len(data))
	binary.BigEndian.PutUint16(b, 40000)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint32(b[4:], 1)
	b[12], b[13] = 5<<4, flags
	binary.BigEndian.PutUint16(b[14:], 1024)
	return withSum(append(b, data...), from, to, 6, 16)
}

// Datagram makes a UDP datagram between two addresses.
func Datagram(from, to string, port uint16, data []byte) []byte {
	b := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(b, 40001)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(data)))
	return withSum(append(b, data...), from, to, 17, 6)
}

// Message makes an ICMP message; for IPv6 the checksum needs the addresses.
func Message(from, to string, kind, code byte, rest ...byte) []byte {
	b := append([]byte{kind, code, 0, 0}, rest...)
	if netip.MustParseAddr(to).Is6() {
		return withSum(b, from, to, 58, 2)
	}
	binary.BigEndian.PutUint16(b[2:], ^sum(b, 0))
	return b
}

// withSum puts the checksum over what is before it and the addresses at a place.
func withSum(b []byte, from, to string, protocol byte, at int) []byte {
	pseudo := append(netip.MustParseAddr(from).AsSlice(), netip.MustParseAddr(to).AsSlice()...)
	pseudo = append(pseudo, 0, protocol, byte(len(b)>>8), byte(len(b)))
	binary.BigEndian.PutUint16(b[at:], ^sum(b, uint32(sum(pseudo, 0))))
	return b
}

// sum is the sum of the Internet checksum (RFC 1071).
func sum(b []byte, begin uint32) uint16 {
	total := begin
	for i := 0; i < len(b); i += 2 {
		total += uint32(b[i]) << 8
		if i+1 < len(b) {
			total += uint32(b[i+1])
		}
	}
	for total > 0xffff {
		total = total>>16 + total&0xffff
	}
	return uint16(total)
}
