package agent

import (
	"net"
	"net/netip"
	"testing"
)

func TestLinkLocal(t *testing.T) {
	card := net.HardwareAddr{0x02, 0x60, 0x4b, 0x8b, 0x16, 0x01}
	a := linkLocal(card)
	if want := netip.MustParsePrefix("fe80::60:4bff:fe8b:1601/64"); a != want {
		t.Errorf("%v makes %v, want %v", card, a, want)
	}
	const list = `fd666b766d000000000000000000000f 02 40 00 80     eth0
fe8000000000000000604bfffe8b1601 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
`
	for _, c := range []struct {
		list, name string
		want       bool
	}{
		{list, "eth0", true}, {list, "lo", false}, {list, "eth01", false}, {"", "eth0", false}, {"fe8000000000000000604bfffe8b1601 02\n", "eth0", false},
	} {
		if got := hasAddress([]byte(c.list), c.name, a.Addr()); got != c.want {
			t.Errorf("%s has it: %v in %q", c.name, got, c.list)
		}
	}
}
