package policy

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// allows is how somebody with nothing but regions decides.
func allows(list []Region, t Target) bool {
	t.Address = t.Address.Unmap()
	find := func(a netip.Addr) (found Region) {
		for _, r := range list {
			if r.Prefix.Contains(a) { // the longest is the last
				found = r
			}
		}
		return found
	}
	listed := func(r Region) bool {
		return slices.ContainsFunc(r.Ports, func(p Ports) bool {
			return p.Protocol == t.Protocol && p.First <= t.Port && t.Port <= p.Last
		})
	}
	for _, inner := range wrapped(t.Address) {
		if r := find(inner); r.Closed && !listed(r) {
			return false
		}
	}
	r := find(t.Address)
	return listed(r) && (r.Local || !t.Host(t.Address))
}

// TestRegionsSayWhatDecideSays compares the two for addresses in and around every prefix that there is.
func TestRegionsSayWhatDecideSays(t *testing.T) {
	host := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("93.184.216.1"), netip.MustParseAddr("2001:db8::9")}
	resolver := netip.MustParseAddrPort("10.9.9.9:53")
	policies := map[string]Policy{
		"no network": {Mode: NoNetwork},
		"public":     {Mode: Public},
		"public with holes": {Mode: Public, Deny: []string{"8.8.0.0/16", "2001:4860::/32"},
			Allow: []string{"10.1.0.0/16:5432", "fd00:ec2::/64", "192.0.2.9:22/tcp", "127.0.0.0/8:80"}},
		"addresses": {Mode: Allowlist, Deny: []string{"93.184.216.128/25"},
			Allow: []string{"93.184.216.0/24:80", "93.184.216.34", "93.184.216.34:53/udp", "10.0.0.0/9:1-100", "[2001:4860::/32]:443", "1.0.0.0/8/icmp", "0.0.0.0/1:9000-9100", "[2002::/16]:80", "[64:ff9b::/96]:80"}},
		"names": {Mode: Allowlist, Allow: []string{"example.org:443", "*.example.net", "10.1.0.0/16:53/udp"}, Deny: []string{"9.9.9.0/24"}},
	}
	for name, p := range policies {
		r := compile(t, p)
		named := name == "names"
		list := r.Regions(Surroundings{Host: host, Resolvers: []netip.AddrPort{resolver}})
		for _, a := range around(r, host) {
			for _, port := range []uint16{1, 22, 53, 80, 100, 101, 443, 853, 5432, 9000, 9101} {
				for _, protocol := range []Protocol{TCP, UDP, ICMP} {
					target := Target{Protocol: protocol, Address: a, Port: port, Host: func(a netip.Addr) bool { return slices.Contains(host, a) }}
					if protocol == ICMP {
						target.Port = 0
					}
					if named {
						target.Names = []string{"example.org", "a.example.net"}
					}
					wraps := wrapped(a) != nil
					got, want := allows(list, target), r.Decide(target).Allowed
					if (named || p.Mode == Public) && a.Unmap() == resolver.Addr() && port == 53 && protocol != ICMP {
						want = true
					}
					// Of what is wrapped, Decide knows which ports are resolvers'.
					if got != want && (!wraps || !got || port != 53 && port != 853) {
						t.Errorf("%s: %v %v port %d: regions say %v, the policy %v", name, protocol, a, port, got, want)
					}
				}
			}
		}
	}
}

// around are addresses at the edges of all prefixes, wrapped ones, and some others.
func around(r *Rules, host []netip.Addr) (list []netip.Addr) {
	prefixes := slices.Concat(r.deny, r.special, nobody(), []netip.Prefix{netip.MustParsePrefix("10.9.9.9/32")})
	for _, e := range r.allow {
		if e.name == "" {
			prefixes = append(prefixes, e.prefix)
		}
	}
	for _, a := range host {
		prefixes = append(prefixes, single(a))
	}
	random := rand.New(rand.NewPCG(1, 2))
	for _, p := range prefixes {
		first := p.Addr()
		inside := first.AsSlice()
		for i := p.Bits(); i < len(inside)*8; i++ {
			inside[i/8] |= byte(random.IntN(2)) << (7 - i%8)
		}
		middle, _ := netip.AddrFromSlice(inside)
		list = append(list, first, middle, first.Next())
		if before := first.Prev(); before.IsValid() {
			list = append(list, before)
		}
		if first.Is4() {
			list = slices.AppendSeq(list, maps.Values(forms(middle)))
		}
	}
	return slices.DeleteFunc(list, func(a netip.Addr) bool { return !a.IsValid() })
}

func TestRegionsAreFew(t *testing.T) {
	for _, tt := range []struct {
		p    Policy
		want int
	}{
		{Policy{Mode: NoNetwork}, 2},
		{Policy{Mode: Allowlist, Allow: []string{"93.184.216.34:80"}}, 3 + len(specials()) + len(nobody())},
	} {
		list := compile(t, tt.p).Regions(Surroundings{Host: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
		if len(list) > tt.want {
			t.Errorf("%v: %d regions, at most %d are needed: %v", tt.p, len(list), tt.want, list)
		}
	}
}
