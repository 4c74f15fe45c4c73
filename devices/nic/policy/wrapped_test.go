package policy

import (
	"net/netip"
	"slices"
	"testing"
)

// forms are the ways to write an address of IPv4 as one of IPv6, by name.
func forms(a netip.Addr) map[string]netip.Addr {
	b := a.As4()
	all := map[string]netip.Addr{
		"mapped":                      netip.AddrFrom16(a.As16()),
		"compatible":                  netip.AddrFrom16([16]byte{12: b[0], b[1], b[2], b[3]}),
		"translated, as once":         netip.AddrFrom16([16]byte{8: 0xff, 0xff, 12: b[0], b[1], b[2], b[3]}),
		"translated":                  netip.AddrFrom16([16]byte{0, 0x64, 0xff, 0x9b, 12: b[0], b[1], b[2], b[3]}),
		"translated by a site":        netip.AddrFrom16([16]byte{0, 0x64, 0xff, 0x9b, 0, 1, 12: b[0], b[1], b[2], b[3]}),
		"translated by a site, 64":    netip.AddrFrom16([16]byte{0, 0x64, 0xff, 0x9b, 0, 1, 9: b[0], b[1], b[2], b[3]}),
		"translated by a site, 56":    netip.AddrFrom16([16]byte{0, 0x64, 0xff, 0x9b, 0, 1, 7: b[0], 9: b[1], b[2], b[3]}),
		"translated by a site, 48":    netip.AddrFrom16([16]byte{0, 0x64, 0xff, 0x9b, 0, 1, b[0], b[1], 9: b[2], b[3]}),
		"6to4":                        netip.AddrFrom16([16]byte{0x20, 0x02, b[0], b[1], b[2], b[3], 15: 1}),
		"Teredo's server":             netip.AddrFrom16([16]byte{0x20, 0x01, 4: b[0], b[1], b[2], b[3], 12: 0xf6, 0xf6, 0xf6, 0xf6}),
		"Teredo's client":             netip.AddrFrom16([16]byte{0x20, 0x01, 4: 9, 9, 9, 9, 12: ^b[0], ^b[1], ^b[2], ^b[3]}),
		"ISATAP":                      netip.AddrFrom16([16]byte{0x26, 0x20, 0, 1, 10: 0x5e, 0xfe, b[0], b[1], b[2], b[3]}),
		"ISATAP, global":              netip.AddrFrom16([16]byte{0x26, 0x20, 0, 1, 8: 0x02, 10: 0x5e, 0xfe, b[0], b[1], b[2], b[3]}),
		"ISATAP in 6to4 of another":   netip.AddrFrom16([16]byte{0x20, 0x02, 9, 9, 9, 9, 10: 0x5e, 0xfe, b[0], b[1], b[2], b[3]}),
		"6to4 with ISATAP of another": netip.AddrFrom16([16]byte{0x20, 0x02, b[0], b[1], b[2], b[3], 10: 0x5e, 0xfe, 9, 9, 9, 9}),
	}
	return all
}

// Case D6: however an address of IPv4 is written, it is refused as what it is.
func TestCaseD6Wrapped(t *testing.T) {
	host := netip.MustParseAddr("20.9.9.9")
	deny := []string{"8.8.4.0/24"}
	// The forms that are special by themselves are opened.
	open := []string{"[64:ff9b:1::/48]", "[2001::/32]"}
	policies := map[string]Policy{
		"public":     {Mode: Public, Allow: open, Deny: deny},
		"everything": {Mode: Allowlist, Allow: append([]string{"0.0.0.0/0", "::/0"}, open...), Deny: deny},
		"names":      {Mode: Allowlist, Allow: append([]string{"good.example"}, open...), Deny: deny},
		"all forms": {Mode: Allowlist, Deny: deny, Allow: append([]string{"::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "2002::/16", "2620:1::/64", "good.example"},
			open...)},
	}
	inner := map[string]Reason{
		host.String(): ReasonSpecial, "8.8.4.4": ReasonDenied, "169.254.169.254": ReasonSpecial, "127.0.0.1": ReasonSpecial,
		"10.0.0.1": ReasonSpecial, "224.0.0.1": ReasonNobody, "20.1.1.1": "",
	}
	for name, p := range policies {
		r := compile(t, p)
		for text, want := range inner {
			for form, a := range forms(netip.MustParseAddr(text)) {
				v := r.Decide(Target{
					Protocol: TCP, Address: a, Port: 443, Names: []string{"good.example"}, Host: func(a netip.Addr) bool { return a == host },
				})
				if v.Allowed != (want == "") || v.Reason != want {
					t.Errorf("%s: %s, %s (%v): got %+v, want reason %q", name, text, form, a, v, want)
				}
			}
		}
	}
}

// What opens a form opens nothing that is wrapped in it; what opens that does both.
func TestWrappedHostIsOpened(t *testing.T) {
	host := netip.MustParseAddr("20.9.9.9")
	target := Target{Protocol: TCP, Port: 443, Address: forms(host)["translated"], Host: func(a netip.Addr) bool { return a == host }}
	for _, tt := range []struct {
		allow []string
		want  bool
	}{
		{[]string{"[64:ff9b::/96]:443"}, false},
		{[]string{"[64:ff9b::/96]:443", "20.9.9.0/24:443"}, false},
		{[]string{"[64:ff9b::/96]:443", "20.9.9.9:444"}, false},
		{[]string{"[64:ff9b::/96]:443", "20.9.9.9:443"}, true},
		{[]string{"20.9.9.9:443"}, false},
	} {
		if v := compile(t, Policy{Mode: Allowlist, Allow: tt.allow}).Decide(target); v.Allowed != tt.want {
			t.Errorf("%v: %+v", tt.allow, v)
		}
	}
}

func TestWrappedIsItself(t *testing.T) {
	for _, a := range []string{"20.1.1.1", "::", "::1", "2620:1::1", "64:ff9a::1", "2001:4860::8888", "2620:1::5efe", "fe80::1"} {
		if list := wrapped(netip.MustParseAddr(a)); list != nil {
			t.Errorf("%s stands for %v", a, list)
		}
	}
	// No length of the prefix gives anything but zeros.
	if list := wrapped(netip.MustParseAddr("64:ff9b:1::7")); !slices.Equal(list, []netip.Addr{netip.MustParseAddr("0.0.0.7")}) {
		t.Errorf("a site's prefix with little behind it stands for %v", list)
	}
}
