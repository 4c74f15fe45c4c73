package linux

import (
	"fmt"
	"net"
	"net/netip"
)

// HostAddresses are the addresses at which this host, in the caller's network namespace, hears what is sent: its own, and those that its
// networks have for all stations (IPv4's broadcasts) or for their router (RFC 4291, section 2.6.1). They have no zones, and those
// of IPv4 are no mapped ones.
func HostAddresses() ([]netip.Addr, error) {
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list addresses of this host: %w", err)
	}
	var list []netip.Addr
	for _, a := range interfaces {
		network, ok := a.(*net.IPNet)
		if !ok {
			continue // none, as long as the standard library keeps its word
		}
		if own, ok := netip.AddrFromSlice(network.IP); ok {
			own = own.Unmap()
			ones, bits := network.Mask.Size()
			list = append(list, heardAt(netip.PrefixFrom(own, max(ones-bits+own.BitLen(), 0)))...)
		}
	}
	return list, nil
}

// heardAt returns the addresses at which the station hears that has the prefix's address in its network. Loopback's network has none but that.
func heardAt(p netip.Prefix) []netip.Addr {
	own := p.Addr().Unmap().WithZone("")
	list := []netip.Addr{own}
	if p = netip.PrefixFrom(own, p.Bits()); own.IsLoopback() || own.BitLen()-p.Bits() < 2 {
		return list // two stations at most, and no address for both
	}
	first := p.Masked().Addr()
	list = append(list, first)
	if own.Is4() {
		last := first.As4()
		for i := p.Bits(); i < 32; i++ {
			last[i/8] |= 0x80 >> (i % 8)
		}
		list = append(list, netip.AddrFrom4(last))
	}
	return list
}
