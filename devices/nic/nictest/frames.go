package nictest

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/forkvm/forkvm/devices/nic"
)

// Frame is one from the guest to its gateway.
func Frame(kind uint16, packet []byte) []byte {
	f := append(nic.GatewayMAC[:], Card[:]...)
	return append(binary.BigEndian.AppendUint16(f, kind), packet...)
}

// Packet4 is a packet of IPv4 without options, with its checksum.
func Packet4(from, to string, protocol byte, payload []byte) []byte {
	a, b := netip.MustParseAddr(from).As4(), netip.MustParseAddr(to).As4()
	p := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0}
	p = append(append(append(p, a[:]...), b[:]...), payload...)
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	binary.BigEndian.PutUint16(p[10:], ^uint16(sum>>16+sum&0xffff))
	return p
}

// Packet6 is a packet of IPv6 that no router has passed on.
func Packet6(from, to string, next byte, payload []byte) []byte {
	a, b := netip.MustParseAddr(from).As16(), netip.MustParseAddr(to).As16()
	p := []byte{0x60, 0, 0, 0, byte(len(payload) >> 8), byte(len(payload)), next, 255}
	return append(append(append(p, a[:]...), b[:]...), payload...)
}

// ARP is a message about addresses of IPv4 (RFC 826).
func ARP(operation byte, mac nic.MAC, sender, target string) []byte {
	a, b := netip.MustParseAddr(sender).As4(), netip.MustParseAddr(target).As4()
	p := append([]byte{0, 1, 8, 0, 6, 4, 0, operation}, mac[:]...)
	p = append(append(p, a[:]...), make([]byte, 6)...)
	return append(p, b[:]...)
}

// Change returns a copy that has other bytes from a place on.
func Change(b []byte, at int, v ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[at:], v)
	return b
}
