package linux

import (
	"net/netip"
	"slices"
	"testing"
)

func TestHeardAt(t *testing.T) {
	for prefix, want := range map[string][]string{
		"127.0.0.1/8":              {"127.0.0.1"},
		"::1/128":                  {"::1"},
		"198.18.7.9/22":            {"198.18.7.9", "198.18.4.0", "198.18.7.255"},
		"198.18.7.9/31":            {"198.18.7.9"},
		"198.18.7.9/32":            {"198.18.7.9"},
		"198.18.7.9/0":             {"198.18.7.9", "0.0.0.0", "255.255.255.255"},
		"2620:1::9/64":             {"2620:1::9", "2620:1::"},
		"2620:1::9/127":            {"2620:1::9"},
		"2620:1:0:0:8000:0:0:9/65": {"2620:1:0:0:8000:0:0:9", "2620:1:0:0:8000::"},
	} {
		var addresses []netip.Addr
		for _, a := range want {
			addresses = append(addresses, netip.MustParseAddr(a))
		}
		if got := heardAt(netip.MustParsePrefix(prefix)); !slices.Equal(got, addresses) {
			t.Errorf("%s: %v", prefix, got)
		}
	}
}

func TestHostAddresses(t *testing.T) {
	list, err := HostAddresses()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(list, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("%v are without loopback", list)
	}
}
