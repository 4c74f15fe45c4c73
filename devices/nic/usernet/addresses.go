package usernet

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/internal/linux"
)

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
		Addresses: []netip.Prefix{netip.PrefixFrom(nic.Guest4, nic.Bits4), netip.PrefixFrom(nic.Guest6, nic.Bits6)},
		Gateways:  []netip.Addr{nic.Gateway4, nic.Gateway6},
		Resolvers: []netip.Addr{nic.Resolver4, nic.Resolver6},
	}
}
