package nic

import "net/netip"

// Addressing is what a guest is on the network behind its card, and where it finds others.
type Addressing struct {
	Addresses []netip.Prefix // its own
	Gateways  []netip.Addr   // one of each family
	Resolvers []netip.Addr
}

// Addresses on the link. They are the same for every guest, whatever is behind its card, since none sees another's: a guest finds
// its network as it was when it goes on over another one.
var (
	Guest4    = netip.AddrFrom4([4]byte{10, 0, 2, 15})
	Gateway4  = netip.AddrFrom4([4]byte{10, 0, 2, 2})
	Resolver4 = netip.AddrFrom4([4]byte{10, 0, 2, 3})
	Guest6    = onLink6(15)
	Gateway6  = onLink6(2)
	Resolver6 = onLink6(3)
)

// Lengths of the link's prefixes.
const (
	Bits4 = 24
	Bits6 = 64
)

// onLink6 is an address of the link's unique local prefix, fd66:6b76:6d00::/64.
func onLink6(host byte) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0x66, 0x6b, 0x76, 0x6d, 15: host})
}

// OnLink says whether an address is one of the link's, the guest's own included.
func OnLink(a netip.Addr) bool {
	return netip.PrefixFrom(Gateway4, Bits4).Contains(a) || netip.PrefixFrom(Gateway6, Bits6).Contains(a)
}

// GatewayMAC is the gateway's address on the wire.
var GatewayMAC = MAC{0x52, 0x55, 0x0a, 0x00, 0x02, 0x02}
