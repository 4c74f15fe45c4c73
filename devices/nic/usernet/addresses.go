package usernet

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/internal/linux"
)

// Addresses on the link. They are the same for every guest, since none sees another's.
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

// onLink says whether an address is one of the link's, the guest's own included.
func onLink(a netip.Addr) bool {
	return netip.PrefixFrom(Gateway4, Bits4).Contains(a) || netip.PrefixFrom(Gateway6, Bits6).Contains(a)
}

// gatewayMAC is the gateway's address on the wire.
var gatewayMAC = nic.MAC{0x52, 0x55, 0x0a, 0x00, 0x02, 0x02}

// hostAddresses are the addresses of the host that this process runs on, looked at again when they are old.
type hostAddresses struct {
	mu   sync.Mutex
	seen time.Time
	all  []netip.Addr
}

const hostAddressesAge = 5 * time.Second

// has says whether an address is one of the host's. When the host cannot be asked, what was known last counts.
func (h *hostAddresses) has(a netip.Addr) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.seen) > hostAddressesAge {
		if list, err := linux.HostAddresses(); err == nil {
			h.all, h.seen = list, time.Now()
		}
	}
	return slices.Contains(h.all, a.Unmap().WithZone(""))
}

// Addressing is what the guest is to be told.
func (n *Net) Addressing() nic.Addressing {
	return nic.Addressing{
		Addresses: []netip.Prefix{netip.PrefixFrom(Guest4, Bits4), netip.PrefixFrom(Guest6, Bits6)},
		Gateways:  []netip.Addr{Gateway4, Gateway6},
		Resolvers: []netip.Addr{Resolver4, Resolver6},
	}
}
