package policy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

func compile(t testing.TB, p Policy) *Rules {
	t.Helper()
	r, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCompileRefuses(t *testing.T) {
	tests := []struct {
		name string
		p    Policy
		want string
	}{
		{"mode", Policy{Mode: "open"}, `mode "open" is not one of`},
		{"nothing allowed", Policy{Mode: Allowlist}, "without an entry"},
		{"no network with an entry", Policy{Mode: NoNetwork, Allow: []string{"example.org"}}, `allow "example.org": mode no-network allows nothing`},
		{"public with a name", Policy{Mode: Public, Allow: []string{"example.org"}}, "allows all names"},
		{"twice", Policy{Mode: Allowlist, Allow: []string{"a.example", "b.example", "a.example"}}, `allow "a.example": is there twice`},
		{"denied twice", Policy{Mode: Public, Deny: []string{"10.0.0.0/8", "10.0.0.0/8"}}, `deny "10.0.0.0/8": is there twice`},
		{"allowed and denied", Policy{Mode: Allowlist, Allow: []string{"10.1.0.0/16"}, Deny: []string{"10.0.0.0/8"}}, `allow "10.1.0.0/16": is denied by 10.0.0.0/8`},
		{"a name denied", Policy{Mode: Public, Deny: []string{"example.org"}}, `deny "example.org": is neither a name nor an address`},
		{"empty", Policy{Mode: Allowlist, Allow: []string{""}}, "none"},
		{"a star", Policy{Mode: Allowlist, Allow: []string{"*"}}, "a * stands only in front"},
		{"a star inside", Policy{Mode: Allowlist, Allow: []string{"a.*.example"}}, "a * stands only in front"},
		{"a star only", Policy{Mode: Allowlist, Allow: []string{"*."}}, "0 bytes"},
		{"space", Policy{Mode: Allowlist, Allow: []string{"exa mple.org"}}, `"exa mple" is no part of a host name`},
		{"other alphabet", Policy{Mode: Allowlist, Allow: []string{"bücher.example"}}, "xn--"},
		{"dash", Policy{Mode: Allowlist, Allow: []string{"-a.example"}}, "no part of a host name"},
		{"long label", Policy{Mode: Allowlist, Allow: []string{strings.Repeat("a", 64) + ".example"}}, "no part of a host name"},
		{"URL", Policy{Mode: Allowlist, Allow: []string{"https://example.org"}}, "port"},
		{"port 0", Policy{Mode: Allowlist, Allow: []string{"example.org:0"}}, `port "0"`},
		{"port with a sign", Policy{Mode: Allowlist, Allow: []string{"example.org:+1"}}, `port "+1"`},
		{"large port", Policy{Mode: Allowlist, Allow: []string{"example.org:65536"}}, `port "65536"`},
		{"no port", Policy{Mode: Allowlist, Allow: []string{"example.org:"}}, "no port"},
		{"ports backwards", Policy{Mode: Allowlist, Allow: []string{"example.org:2-1"}}, "backwards"},
		{"ICMP with a port", Policy{Mode: Allowlist, Allow: []string{"192.0.2.1:1/icmp"}}, "ICMP has no ports"},
		{"protocol", Policy{Mode: Allowlist, Allow: []string{"192.0.2.1/sctp"}}, "no prefix"},
		{"host bits", Policy{Mode: Allowlist, Allow: []string{"10.0.0.1/8"}}, "is 10.0.0.0/8 meant?"},
		{"address", Policy{Mode: Allowlist, Allow: []string{"10.0.0.256"}}, "neither a name nor an address"},
		{"zone", Policy{Mode: Allowlist, Allow: []string{"fe80::1%eth0"}}, "neither a name nor an address"},
		{"bracket", Policy{Mode: Allowlist, Allow: []string{"[::1"}}, "without its ]"},
		{"behind the bracket", Policy{Mode: Allowlist, Allow: []string{"[2001:db8::1]443"}}, "is no port"},
		{"mapped and wide", Policy{Mode: Allowlist, Allow: []string{"::ffff:0:0/90"}}, "wider"},
		{"too many", Policy{Mode: Allowlist, Allow: make([]string, maxEntries+1)}, "1025 entries"},
	}
	for _, tt := range tests {
		if _, err := tt.p.Compile(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q", tt.name, err, tt.want)
		}
	}
	_, err := Policy{Mode: Allowlist, Allow: []string{"a.example", "*"}}.Compile()
	var entry *EntryError
	if !errors.As(err, &entry) || entry.List != "allow" || entry.Entry != "*" {
		t.Errorf("error %v does not name the entry", err)
	}
}

// Case D6: what an address says goes before what an entry means.
func TestCaseD6Decide(t *testing.T) {
	names := Policy{Mode: Allowlist, Allow: []string{"example.org:443", "*.cdn.example", "mail.example:25-26/tcp", "time.example:123/udp"}}
	wide := Policy{Mode: Allowlist, Allow: []string{"0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"}}
	private := Policy{Mode: Allowlist, Allow: []string{"10.1.0.0/16:5432", "192.168.1.7", "[fd00:1::/32]:443/tcp", "192.168.9.0/24/icmp"}}
	named := Policy{Mode: Public, Allow: []string{"169.254.169.254:80", "127.0.0.1:8080", "198.18.0.0/15"}, Deny: []string{"8.8.4.0/24", "2606:4700::/32"}}
	tests := []struct {
		name   string
		p      Policy
		proto  Protocol
		addr   string
		port   uint16
		names  string
		host   bool
		want   Reason // "" allowed
		byName bool
	}{
		{"name", names, TCP, "93.184.216.34", 443, "example.org", false, "", true},
		{"name, other port", names, TCP, "93.184.216.34", 80, "example.org", false, ReasonNotAllowed, false},
		{"name, QUIC", names, UDP, "93.184.216.34", 443, "example.org", false, ReasonNotAllowed, false},
		{"name, ping", names, ICMP, "93.184.216.34", 0, "example.org", false, ReasonNotAllowed, false},
		{"address without its name", names, TCP, "93.184.216.34", 443, "", false, ReasonNotAllowed, false},
		{"another name", names, TCP, "93.184.216.34", 443, "example.com", false, ReasonNotAllowed, false},
		{"one of the names", names, TCP, "93.184.216.34", 443, "example.com example.org", false, "", true},
		{"below a name", names, TCP, "93.184.216.34", 443, "www.example.org", false, ReasonNotAllowed, false},
		{"wildcard", names, TCP, "93.184.216.34", 80, "a.b.cdn.example", false, "", true},
		{"wildcard's own name", names, TCP, "93.184.216.34", 80, "cdn.example", false, ReasonNotAllowed, false},
		{"looks like the wildcard", names, TCP, "93.184.216.34", 80, "evilcdn.example", false, ReasonNotAllowed, false},
		{"wildcard as a resolver", names, TCP, "93.184.216.34", 853, "a.cdn.example", false, ReasonResolver, false},
		{"range of ports", names, TCP, "93.184.216.34", 26, "mail.example", false, "", true},
		{"UDP by name", names, UDP, "93.184.216.34", 123, "time.example", false, "", true},
		{"rebinding to metadata", names, TCP, "169.254.169.254", 443, "example.org", false, ReasonSpecial, false},
		{"rebinding to loopback", names, TCP, "127.0.0.1", 443, "example.org", false, ReasonSpecial, false},
		{"rebinding to a private network", names, TCP, "10.0.0.1", 443, "example.org", false, ReasonSpecial, false},
		{"rebinding to the host", names, TCP, "93.184.216.35", 443, "example.org", true, ReasonSpecial, false},
		{"rebinding, mapped", names, TCP, "::ffff:169.254.169.254", 443, "example.org", false, ReasonSpecial, false},
		{"rebinding, unique local", names, TCP, "fd00:ec2::254", 443, "example.org", false, ReasonSpecial, false},
		{"resolver of others", names, UDP, "8.8.8.8", 53, "", false, ReasonNotAllowed, false},

		{"everything: an address", wide, TCP, "93.184.216.34", 443, "", false, "", false},
		{"everything: metadata", wide, TCP, "169.254.169.254", 80, "", false, ReasonSpecial, false},
		{"everything: metadata, mapped", wide, TCP, "::ffff:169.254.169.254", 80, "", false, ReasonSpecial, false},
		{"everything: metadata, translated", wide, TCP, "64:ff9b::a9fe:a9fe", 80, "", false, ReasonSpecial, false},
		{"everything: metadata, 6to4", wide, TCP, "2002:a9fe:a9fe::1", 80, "", false, ReasonSpecial, false},
		{"everything: metadata, compatible", wide, TCP, "::169.254.169.254", 80, "", false, ReasonSpecial, false},
		{"everything: metadata of IPv6", wide, TCP, "fd00:ec2::254", 80, "", false, ReasonSpecial, false},
		{"everything: metadata of others", wide, TCP, "100.100.100.200", 80, "", false, ReasonSpecial, false},
		{"everything: loopback", wide, TCP, "127.0.0.1", 80, "", false, ReasonSpecial, false},
		{"everything: loopback of IPv6", wide, TCP, "::1", 80, "", false, ReasonSpecial, false},
		{"everything: this network", wide, TCP, "0.0.0.0", 80, "", false, ReasonNobody, false},
		{"everything: multicast", wide, UDP, "224.0.0.251", 5353, "", false, ReasonNobody, false},
		{"everything: multicast of IPv6", wide, UDP, "ff02::fb", 5353, "", false, ReasonNobody, false},
		{"everything: broadcast", wide, UDP, "255.255.255.255", 67, "", false, ReasonNobody, false},
		{"everything: link-local", wide, TCP, "fe80::1", 80, "", false, ReasonSpecial, false},
		{"everything: the host", wide, TCP, "93.184.216.34", 22, "", true, ReasonSpecial, false},
		{"everything: a resolver", wide, UDP, "8.8.8.8", 53, "", false, ReasonResolver, false},
		{"everything: ping", wide, ICMP, "8.8.8.8", 0, "", false, "", false},

		{"private network", private, TCP, "10.1.2.3", 5432, "", false, "", false},
		{"private network, mapped", private, TCP, "::ffff:10.1.2.3", 5432, "", false, "", false},
		{"private network, UDP", private, UDP, "10.1.2.3", 5432, "", false, "", false},
		{"private network, other port", private, TCP, "10.1.2.3", 22, "", false, ReasonSpecial, false},
		{"private network, ping", private, ICMP, "10.1.2.3", 0, "", false, ReasonSpecial, false},
		{"another private network", private, TCP, "10.2.0.1", 5432, "", false, ReasonSpecial, false},
		{"private address", private, TCP, "192.168.1.7", 22, "", false, "", false},
		{"private address, a resolver", private, UDP, "192.168.1.7", 53, "", false, "", false},
		{"private address of IPv6", private, TCP, "fd00:1::7", 443, "", false, "", false},
		{"private address of IPv6, UDP", private, UDP, "fd00:1::7", 443, "", false, ReasonSpecial, false},
		{"ping only", private, ICMP, "192.168.9.1", 0, "", false, "", false},
		{"ping only, TCP", private, TCP, "192.168.9.1", 80, "", false, ReasonSpecial, false},

		{"public", named, TCP, "93.184.216.34", 443, "", false, "", false},
		{"public: a resolver", named, UDP, "8.8.8.8", 53, "", false, "", false},
		{"public: denied", named, UDP, "8.8.4.4", 53, "", false, ReasonDenied, false},
		{"public: denied, IPv6", named, TCP, "2606:4700::1111", 443, "", false, ReasonDenied, false},
		{"public: denied, translated", named, TCP, "64:ff9b::808:404", 443, "", false, ReasonDenied, false},
		{"public: private", named, TCP, "10.0.0.1", 80, "", false, ReasonSpecial, false},
		{"public: metadata, named", named, TCP, "169.254.169.254", 80, "", false, "", false},
		{"public: metadata, other port", named, TCP, "169.254.169.254", 22, "", false, ReasonSpecial, false},
		{"public: loopback, named", named, TCP, "127.0.0.1", 8080, "", true, "", false},
		{"public: loopback, other port", named, TCP, "127.0.0.1", 22, "", true, ReasonSpecial, false},
		{"public: a range, named", named, TCP, "198.18.5.5", 80, "", false, "", false},

		{"no network", Policy{}, TCP, "93.184.216.34", 443, "", false, ReasonNoNetwork, false},
		{"no network: denied", Policy{Deny: []string{"8.8.8.8"}}, TCP, "8.8.8.8", 443, "", false, ReasonDenied, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := compile(t, tt.p).Decide(Target{
				Protocol: tt.proto, Address: netip.MustParseAddr(tt.addr), Port: tt.port, Names: strings.Fields(tt.names),
				Host: func(a netip.Addr) bool { return tt.host && a == netip.MustParseAddr(tt.addr) },
			})
			if v.Allowed != (tt.want == "") || v.Reason != tt.want || v.ByName != tt.byName {
				t.Errorf("got %+v, want reason %q, by name %v", v, tt.want, tt.byName)
			}
		})
	}
}

func TestResolves(t *testing.T) {
	allow := compile(t, Policy{Mode: Allowlist, Allow: []string{"Example.ORG:443", "*.cdn.example", "10.0.0.0/8"}})
	for name, want := range map[string]bool{
		"example.org": true, "EXAMPLE.org.": true, "a.example.org": false, "org": false, "": false,
		"x.cdn.example": true, "cdn.example": false, "data.evil.example": false, "x.cdn.example.evil": false,
	} {
		if got := allow.Resolves(name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
	if !compile(t, Policy{Mode: Public}).Resolves("any.example") || compile(t, Policy{}).Resolves("any.example") {
		t.Error("public resolves all names and no-network none")
	}
	target := Target{Protocol: TCP, Port: 443}
	if !allow.Serves(target, "example.ORG") || allow.Serves(target, "other.example") || allow.Serves(Target{Protocol: TCP, Port: 80}, "example.org") {
		t.Error("names are served at their ports, and no others")
	}
}

// FuzzCompile: whatever is accepted can be decided by, and opens neither the metadata address nor loopback unless an entry
// lies in their ranges.
func FuzzCompile(f *testing.F) {
	for _, seed := range []string{"example.org", "*.a.example:1-2/udp", "10.0.0.0/8", "[::1]:443", "::ffff:1.2.3.4", "0.0.0.0/0", "1.2.3.4/icmp", "[fe80::/10]:1/tcp"} {
		f.Add(seed, "8.8.8.8")
	}
	f.Fuzz(func(t *testing.T, allow, deny string) {
		p := Policy{Mode: Allowlist, Allow: []string{allow}}
		if deny != "" {
			p.Deny = []string{deny}
		}
		r, err := p.Compile()
		if err != nil {
			return
		}
		for _, a := range []string{"169.254.169.254", "127.0.0.1", "::1", "fd00:ec2::254"} {
			address := netip.MustParseAddr(a)
			v := r.Decide(Target{Protocol: TCP, Address: address, Port: 80, Names: []string{CanonicalName(allow)}})
			if !v.Allowed {
				continue
			}
			rule, err := parseRule(allow)
			if err != nil || rule.name != "" || !rule.prefix.Contains(address) || rule.prefix.Bits() < 7 {
				t.Fatalf("%q opens %s", allow, a)
			}
		}
	})
}
