// Package tapnet makes the network of a VM whose card has a TAP device: a network namespace of its own, with the TAP, one way out,
// programs that decide about every frame (tap.c, compiled by "make bpf" to tap.o), and rules of netfilter that translate
// addresses and answer what is refused.
//
// # Inside
//
// Nothing of it has a name that outlives the VM. The namespace is there as long as the VM's process, which lives in it, and the
// TAP's descriptor, which that process has; with the namespace go its interfaces, the host's end of the way out, programs, maps,
// rules and connections, whoever ended and how. Only the rules of the host, which are the same for all VMs, stay.
//
// The process that has the TAP can change none of it: programs and rules are those of who starts VMs. A new network allows
// nothing, so that it can be made ahead; see Network.Admit.
//
//	guest ── card ── TAP │ programs ── rules, translation ── uplink │ fkvm-… ── rules, translation ── the host's networks
//	                     └──────────── the VM's namespace ──────────┘
package tapnet

import (
	"net/netip"
)

// Names of interfaces. The host's ends of the ways out begin with hostPrefix.
const (
	tapName    = "tap0"
	uplinkName = "uplink"
	hostPrefix = "fkvm-"
)

// Addresses of the ways out, two of each family for each VM: translated on either side, and nobody's (RFC 2544, RFC 4193).
var (
	uplinks4 = netip.MustParsePrefix("198.18.0.0/15")
	uplinks6 = netip.MustParsePrefix("fd66:6b76:6d01::/48")
)

const resolverPort = 53
