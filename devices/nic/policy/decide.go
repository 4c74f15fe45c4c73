package policy

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// Reason is why something is refused: a stable word for journals and metrics.
type Reason string

// The reasons.
const (
	ReasonNoNetwork  Reason = "no_network"       // the mode allows nothing
	ReasonNotAllowed Reason = "not_allowed"      // no entry names it
	ReasonDenied     Reason = "denied"           // an entry of deny names it
	ReasonSpecial    Reason = "special_address"  // private, link-local, metadata, the host: and no entry names it
	ReasonNobody     Reason = "no_station"       // multicast, broadcast, unspecified
	ReasonResolver   Reason = "another_resolver" // DNS and its kin, to others than the guest's own resolver
	ReasonWrongName  Reason = "wrong_name"       // the client asks the server for a name that is not allowed
	ReasonLimit      Reason = "limit"            // more than the guest may have
	ReasonForged     Reason = "forged"           // in the name of another station
	ReasonProtocol   Reason = "protocol"         // a protocol that leads nowhere
	ReasonOptions    Reason = "ip_options"       // source routes and the like, extension headers
	ReasonFragment   Reason = "fragment"         // a fragment of what has to be whole
	ReasonMalformed  Reason = "malformed"        // ends within its headers, or says that it is longer than it is
)

// Target is what a guest wants to reach.
type Target struct {
	Protocol Protocol
	Address  netip.Addr
	Port     uint16 // 0 for ICMP
	// Names are those for which the guest's resolver has answered with the address, in lower case.
	Names []string
	// Host says whether an address is one of the host's own; nil: none is.
	Host func(netip.Addr) bool
}

// Verdict is what a policy says of a target.
type Verdict struct {
	Allowed bool
	Reason  Reason // if not allowed
	// ByName: only names lead here, so that what the client asks the server for has to be one of the allowed.
	ByName bool
}

func refused(r Reason) Verdict { return Verdict{Reason: r} }

// Decide says whether a guest may reach a target.
func (r *Rules) Decide(t Target) Verdict {
	t.Address = t.Address.Unmap()
	if !t.Address.IsValid() || t.Address.IsUnspecified() || t.Address.IsMulticast() || t.Address == netip.AddrFrom4([4]byte{255, 255, 255, 255}) || t.Address.Zone() != "" {
		return refused(ReasonNobody)
	}
	for _, inner := range wrapped(t.Address) {
		within := t
		within.Address, within.Names = inner, nil
		if v := r.Decide(within); !v.Allowed && v.Reason != ReasonNotAllowed {
			return v
		}
	}
	for _, p := range r.deny {
		if p.Contains(t.Address) {
			return refused(ReasonDenied)
		}
	}
	if r.mode == NoNetwork {
		return refused(ReasonNoNetwork)
	}
	if closed := r.specialRange(t); closed.IsValid() {
		if r.opened(t, closed) {
			return Verdict{Allowed: true}
		}
		return refused(ReasonSpecial)
	}
	if r.mode == Public {
		return Verdict{Allowed: true}
	}
	return r.listed(t)
}

// opened says whether an entry names a part of the special range that the target is in.
func (r *Rules) opened(t Target, closed netip.Prefix) bool {
	for i := range r.allow {
		rule := &r.allow[i]
		if rule.name == "" && rule.prefix.Contains(t.Address) && rule.matches(t.Protocol, t.Port) && within(rule.prefix, closed) {
			return true
		}
	}
	return false
}

// resolverPorts are those of resolvers, plain and over TLS, in order.
var resolverPorts = []uint16{53, 853}

// listed looks for an entry. Names are resolved by the guest's resolver alone: others have to be asked for by their port.
func (r *Rules) listed(t Target) Verdict {
	resolver := t.Protocol != ICMP && slices.Contains(resolverPorts, t.Port)
	v := refused(ReasonNotAllowed)
	for i := range r.allow {
		rule := &r.allow[i]
		if !rule.matches(t.Protocol, t.Port) {
			continue
		}
		if rule.name == "" {
			if !rule.prefix.Contains(t.Address) {
				continue
			}
		} else if !anyNamed(rule, t.Names) {
			continue
		}
		if resolver && !rule.ports {
			v = refused(ReasonResolver)
			continue
		}
		if rule.name == "" {
			return Verdict{Allowed: true}
		}
		v = Verdict{Allowed: true, ByName: true}
	}
	return v
}

func anyNamed(r *rule, names []string) bool {
	for _, name := range names {
		if r.names(name) {
			return true
		}
	}
	return false
}

// Resolves says whether the guest may ask for a name.
func (r *Rules) Resolves(name string) bool {
	name = CanonicalName(name)
	switch r.mode {
	case Public:
		return true
	case Allowlist:
		for i := range r.allow {
			if r.allow[i].names(name) {
				return true
			}
		}
	}
	return false
}

// Serves says whether a client may ask for a name at a target that is allowed by name.
func (r *Rules) Serves(t Target, name string) bool {
	name = CanonicalName(name)
	for i := range r.allow {
		if r.allow[i].names(name) && r.allow[i].matches(t.Protocol, t.Port) {
			return true
		}
	}
	return r.mode == Public
}

// CanonicalName returns a name as rules have it.
func CanonicalName(name string) string {
	return strings.ToLower(strings.TrimSuffix(name, "."))
}

// within says whether all of inner is in outer.
func within(inner, outer netip.Prefix) bool {
	return inner.Bits() >= outer.Bits() && outer.Contains(inner.Addr())
}

// specials are the ranges that public means not (IANA's special-purpose registries): what is there is the host's neighbourhood,
// or nobody's.
var specials = sync.OnceValue(func() (ranges []netip.Prefix) {
	for _, text := range []string{
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
		"192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
		"::1/128", "64:ff9b:1::/48", "100::/64", "2001:db8::/32", "fc00::/7", "fe80::/10", "fec0::/10", "2001::/32", "5f00::/16",
	} {
		ranges = append(ranges, netip.MustParsePrefix(text))
	}
	return ranges
})

// specialRange returns the special range that a target is in. One of the host's own addresses is a range by itself.
func (r *Rules) specialRange(t Target) netip.Prefix {
	if t.Host != nil && t.Host(t.Address) {
		return netip.PrefixFrom(t.Address, t.Address.BitLen())
	}
	for _, p := range r.special {
		if p.Contains(t.Address) {
			return p
		}
	}
	return netip.Prefix{}
}
