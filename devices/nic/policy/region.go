package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
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
var nobody = sync.OnceValue(func() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("224.0.0.0/4"),
		netip.MustParsePrefix("::/128"), netip.MustParsePrefix("ff00::/8"),
	}
})

// everywhere are the regions' outermost prefixes, so that each address is in one.
func everywhere() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// Regions says what the policy allows as far as that is about addresses, for somebody who knows no names. An entry with a name
// allows its ports of each address that is not special and not denied; without such entries the regions allow what Decide does.
// Of an address of IPv6 that wraps one of IPv4, the region of either has to allow it, see Region.Closed. They are in order:
// shorter prefixes first.
func (r *Rules) Regions(s Surroundings) []Region {
	b := regions{Rules: r}
	if r.mode != NoNetwork && (r.mode == Public || slices.ContainsFunc(r.allow, func(e rule) bool { return e.name != "" })) {
		b.resolvers = s.Resolvers
	}
	b.walk(b.places(s.Host))
	slices.SortFunc(b.list, func(a, b Region) int {
		return cmp.Or(cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()), a.Prefix.Addr().Compare(b.Prefix.Addr()))
	})
	return b.list
}

// single is the prefix of one address.
func single(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	return netip.PrefixFrom(a, a.BitLen())
}

// place is a prefix that a policy, or what it has to know, makes a difference for.
type place struct {
	prefix netip.Prefix
	closed bool         // for everybody
	own    bool         // it is an address of the host's
	within netip.Prefix // the special range that it is in, see specialRange; there is none if it is not valid
}

// regions are being made of rules.
type regions struct {
	*Rules
	resolvers []netip.AddrPort // that are asked for the guest's names, if it may ask for some
	list      []Region
}

// places returns all places, each prefix before those that are in it.
func (b *regions) places(host []netip.Addr) []place {
	list := make([]place, 0, 2+len(nobody())+len(b.deny)+len(b.special)+len(b.allow)+len(host)+len(b.resolvers))
	add := func(prefixes []netip.Prefix, p place) {
		for _, p.prefix = range prefixes {
			list = append(list, p)
		}
	}
	add(everywhere(), place{})
	add(nobody(), place{closed: true})
	add(b.deny, place{closed: true})
	for _, p := range b.special {
		list = append(list, place{prefix: p, within: p})
	}
	for i := range b.allow {
		if b.allow[i].name == "" {
			list = append(list, place{prefix: b.allow[i].prefix})
		}
	}
	for _, a := range host {
		list = append(list, place{prefix: single(a), own: true})
	}
	for _, a := range b.resolvers {
		list = append(list, place{prefix: single(a.Addr())})
	}
	slices.SortFunc(list, func(a, b place) int {
		return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()))
	})
	return list
}

// walk makes a region of each place that differs from what is around it.
func (b *regions) walk(list []place) {
	b.list = make([]Region, 0, len(list))
	type level struct {
		place
		region int // that says what is there
	}
	var around []level // the outermost first
	for len(list) > 0 {
		p := list[0]
		for list = list[1:]; len(list) > 0 && list[0].prefix == p.prefix; list = list[1:] {
			p.add(list[0])
		}
		for len(around) > 0 && !within(p.prefix, around[len(around)-1].prefix) {
			around = around[:len(around)-1]
		}
		at := len(b.list)
		if len(around) == 0 {
			b.list = append(b.list, b.region(p))
		} else {
			outer := &around[len(around)-1]
			p.add(outer.place)
			if r := b.region(p); b.list[outer.region].same(&r) {
				at = outer.region
			} else {
				b.list = append(b.list, r)
			}
		}
		around = append(around, level{p, at})
	}
}

// add adds what is true of another place that all of this one is in. Special ranges are not in each other.
func (p *place) add(o place) {
	p.closed = p.closed || o.closed
	p.own = p.own || o.own && o.prefix == p.prefix
	if o.within.IsValid() {
		p.within = o.within
	}
}

// region decides about the addresses of a place that are in no smaller one.
func (b *regions) region(p place) Region {
	r := Region{Prefix: p.prefix}
	if p.own {
		p.within = p.prefix
	}
	switch {
	case p.closed, b.mode == NoNetwork:
		r.Closed = true
	case p.within.IsValid():
		r.Closed = true
		r.Ports = b.ports(p.prefix, func(e *rule) bool { return e.name == "" && within(e.prefix, p.within) }, false)
		r.Local = len(r.Ports) > 0 && (p.own || p.prefix.Addr().IsLoopback())
	case b.mode == Public:
		r.Ports = []Ports{{TCP, 0, 65535}, {UDP, 0, 65535}, {ICMP, 0, 0}}
	default:
		r.Ports = b.ports(p.prefix, func(*rule) bool { return true }, true)
	}
	b.addResolver(&r, p.own)
	return r
}

// addResolver lets the guest's own resolver ask.
func (b *regions) addResolver(r *Region, own bool) {
	for _, a := range b.resolvers {
		if r.Prefix == single(a.Addr()) {
			r.Ports = join(append(r.Ports, Ports{TCP, a.Port(), a.Port()}, Ports{UDP, a.Port(), a.Port()}))
			r.Local = r.Local || own || r.Prefix.Addr().IsLoopback()
		}
	}
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
