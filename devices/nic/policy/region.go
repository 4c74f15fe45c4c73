package policy

import (
	"cmp"
	"net/netip"
	"slices"
)

// Surroundings are what a policy has to know of the host, to say what it allows without being asked about each connection.
type Surroundings struct {
	Host      []netip.Addr     // the host's own addresses
	Resolvers []netip.AddrPort // that are asked for the guest's names
}

// Ports are a part of what a station offers. ICMP has the one port 0.
type Ports struct {
	Protocol    Protocol
	First, Last uint16
}

// Region is addresses of which a policy says the same: those in Prefix that are in no longer prefix of another region.
type Region struct {
	Prefix netip.Prefix
	// Ports may be reached. They are sorted and apart.
	Ports []Ports
	// Closed: what is not in Ports is refused to addresses that wrap one of these, too.
	Closed bool
	// Local: the addresses may be the host's own.
	Local bool
}

// same says whether two regions differ in their prefix only.
func (r *Region) same(o *Region) bool {
	return r.Closed == o.Closed && r.Local == o.Local && slices.Equal(r.Ports, o.Ports)
}

// nobody are addresses of no station.
func nobody() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("224.0.0.0/4"),
		netip.MustParsePrefix("::/128"), netip.MustParsePrefix("ff00::/8"),
	}
}

// everywhere are the regions' outermost prefixes, so that each address is in one.
func everywhere() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// Regions says what the policy allows as far as that is about addresses, for somebody who knows no names. An entry with a name
// allows its ports of each address that is not special and not denied; without such entries the regions allow what Decide does.
// Of an address of IPv6 that wraps one of IPv4, the region of either has to allow it, see Region.Closed. They are in order:
// shorter prefixes first.
func (r *Rules) Regions(s Surroundings) []Region {
	b := regions{Rules: r, around: s, nobody: nobody()}
	prefixes := slices.Concat(everywhere(), b.nobody, r.deny, r.special)
	for i := range r.allow {
		if r.allow[i].name == "" {
			prefixes = append(prefixes, r.allow[i].prefix)
		}
	}
	for _, a := range s.Host {
		prefixes = append(prefixes, single(a))
	}
	if b.names = r.mode == Public || slices.ContainsFunc(r.allow, func(e rule) bool { return e.name != "" }); b.names {
		for _, a := range s.Resolvers {
			prefixes = append(prefixes, single(a.Addr()))
		}
	}
	slices.SortFunc(prefixes, func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), a.Addr().Compare(b.Addr()))
	})
	for _, p := range slices.Compact(prefixes) {
		b.add(b.region(p))
	}
	return b.list
}

// single is the prefix of one address.
func single(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	return netip.PrefixFrom(a, a.BitLen())
}

// regions are being made of rules.
type regions struct {
	*Rules
	around Surroundings
	nobody []netip.Prefix
	names  bool // are asked for
	list   []Region
}

// add adds a region, unless it says what the one around it says.
func (b *regions) add(r Region) {
	for i := range slices.Backward(b.list) {
		if around := &b.list[i]; within(r.Prefix, around.Prefix) {
			if around.same(&r) {
				return
			}
			break
		}
	}
	b.list = append(b.list, r)
}

// region decides about the addresses of a prefix that are in no longer one.
func (b *regions) region(p netip.Prefix) Region {
	r := Region{Prefix: p}
	covered := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(q netip.Prefix) bool { return within(p, q) })
	}
	own := b.isHost(p)
	switch closed := b.closedRange(p, own); {
	case covered(b.nobody), covered(b.deny), b.mode == NoNetwork:
		r.Closed = true
	case closed.IsValid():
		r.Closed = true
		r.Ports = b.ports(p, func(e *rule) bool { return e.name == "" && within(e.prefix, closed) }, false)
		r.Local = len(r.Ports) > 0 && (own || p.Addr().IsLoopback())
	case b.mode == Public:
		r.Ports = []Ports{{TCP, 0, 65535}, {UDP, 0, 65535}, {ICMP, 0, 0}}
	default:
		r.Ports = b.ports(p, func(*rule) bool { return true }, true)
	}
	if b.names && b.mode != NoNetwork {
		b.addResolver(&r, own)
	}
	return r
}

// addResolver lets the guest's own resolver ask.
func (b *regions) addResolver(r *Region, own bool) {
	for _, a := range b.around.Resolvers {
		if r.Prefix == single(a.Addr()) {
			r.Ports = join(append(r.Ports, Ports{TCP, a.Port(), a.Port()}, Ports{UDP, a.Port(), a.Port()}))
			r.Local = r.Local || own || r.Prefix.Addr().IsLoopback()
		}
	}
}

func (b *regions) isHost(p netip.Prefix) bool {
	return p.IsSingleIP() && slices.ContainsFunc(b.around.Host, func(a netip.Addr) bool { return single(a) == p })
}

// closedRange is the special range that a prefix is in, see specialRange.
func (b *regions) closedRange(p netip.Prefix, own bool) netip.Prefix {
	if own {
		return p
	}
	for _, s := range b.special {
		if within(p, s) {
			return s
		}
	}
	return netip.Prefix{}
}

// ports joins those of the entries that are about a prefix and counted. Of entries without ports those of resolvers are left
// out, if that is to be: see listed.
func (b *regions) ports(p netip.Prefix, counts func(*rule) bool, spare bool) (list []Ports) {
	for i := range b.allow {
		e := &b.allow[i]
		if e.name == "" && !within(p, e.prefix) || !counts(e) {
			continue
		}
		for _, protocol := range []Protocol{TCP, UDP, ICMP} {
			switch {
			case e.protocols&protocol == 0:
			case protocol == ICMP:
				list = append(list, Ports{ICMP, 0, 0})
			case spare && !e.ports:
				first := uint16(0)
				for _, port := range resolverPorts {
					list = append(list, Ports{protocol, first, port - 1})
					first = port + 1
				}
				list = append(list, Ports{protocol, first, 65535})
			default:
				list = append(list, Ports{protocol, e.first, e.last})
			}
		}
	}
	return join(list)
}

// join sorts ports and makes one of those that touch.
func join(list []Ports) []Ports {
	slices.SortFunc(list, func(a, b Ports) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.First, b.First))
	})
	joined := list[:0]
	for _, p := range list {
		if n := len(joined); n > 0 && joined[n-1].Protocol == p.Protocol && int(p.First) <= int(joined[n-1].Last)+1 {
			joined[n-1].Last = max(joined[n-1].Last, p.Last)
			continue
		}
		joined = append(joined, p)
	}
	return joined
}
