package policy

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// wrapped returns the addresses of IPv4 that one of IPv6 stands for, none if it is only itself. Packets for it go there in the end: whoever
// unwraps them may be anywhere on their way, the host included. Mapped addresses are not here, Addr.Unmap is for them; nor are those
// that a network gives to IPv4 by a prefix of its own, which nobody can tell.
func wrapped(a netip.Addr) (list []netip.Addr) {
	if !a.Is6() {
		return nil
	}
	b := a.As16()
	var w [4]uint32
	for i := range w {
		w[i] = binary.BigEndian.Uint32(b[4*i:])
	}
	add := func(four ...uint32) {
		for _, v := range four {
			list = append(list, netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v))))
		}
	}
	switch {
	case w[0] == 0 && w[1] == 0 && w[2] == 0 && w[3] > 1: // compatible (RFC 4291, section 2.5.5.1)
		add(w[3])
	case w[0] == 0 && w[1] == 0 && w[2] == 0xffff_0000: // translated (RFC 2765, section 2.1)
		add(w[3])
	case w[0] == 0x0064_ff9b && w[1] == 0 && w[2] == 0: // translated (RFC 6052, section 2.1)
		add(w[3])
	case w[0] == 0x0064_ff9b && w[1]>>16 == 1: // translated with a prefix of a site's own (RFC 8215)
		add(w[3], w[2]<<8|w[3]>>24, w[1]<<24|w[2]&0xff_ffff, w[1]<<16|w[2]>>8&0xffff)
		list = sited(list)
	case w[0]>>16 == 0x2002: // 6to4 (RFC 3056, section 2)
		add(w[0]<<16 | w[1]>>16)
	case w[0] == 0x2001_0000: // Teredo, its server and its client (RFC 4380, section 4)
		add(w[1], ^w[3])
	}
	if w[2]&^0x0200_0000 == 0x5efe { // ISATAP, with any prefix (RFC 5214, section 6.1)
		add(w[3])
	}
	return list
}

// sited returns which of the readings of an address may be meant, of which there is one for each length of the prefix (RFC 6052, section
// 2.2). Wrong ones begin with zeros as a rule, and may be something else that is public.
func sited(readings []netip.Addr) []netip.Addr {
	some := slices.DeleteFunc(slices.Clone(readings), func(a netip.Addr) bool { return a.As4()[0] == 0 })
	if len(some) == 0 {
		return readings[:1]
	}
	return some
}
