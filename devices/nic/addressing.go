package nic

import "net/netip"

// Addressing is what a guest is on the network behind its card, and where it finds others.
type Addressing struct {
	Addresses []netip.Prefix // its own
	Gateways  []netip.Addr   // one of each family
	Resolvers []netip.Addr
}
