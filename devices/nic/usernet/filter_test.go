package usernet

import (
	"net/netip"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// frame makes an Ethernet frame from the guest to the gateway.
// Case D7: tricks below and in IP end here, each in its class.
func TestCaseD7Classes(t *testing.T) {
	const g4, g6 = "10.0.2.15", "fd66:6b76:6d00::f"
	udp := make([]byte, 8)
	ping4, ping6 := []byte{8, 0, 0, 0, 0, 1, 0, 2, 'x'}, []byte{128, 0, 0, 0, 0, 1, 0, 2, 'x'}
	good := nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolUDP, udp))
	solicit := func(target string) []byte {
		a := netip.MustParseAddr(target).As16()
		return append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, a[:]...)
	}
	options := nictest.Change(nictest.Packet4(g4, "8.8.8.8", protocolUDP, make([]byte, 48)), 0, 0x46)
	tests := []struct {
		name string
		f    []byte
		want Class
	}{
		{"UDP", good, ClassPacket},
		{"TCP", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolTCP, make([]byte, 20))), ClassPacket},
		{"UDP of IPv6", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolUDP, udp)), ClassPacket},
		{"padded", append(append([]byte(nil), good...), make([]byte, 18)...), ClassPacket},
		{"fragment", nictest.Change(good, 14+6, 0x20), ClassPacket},
		{"later fragment", nictest.Change(good, 14+7, 3), ClassPacket},
		{"fragment of IPv6", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolFragment, append([]byte{protocolUDP, 0, 0, 1, 0, 0, 0, 1}, udp...))), ClassPacket},
		{"ping", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolICMP, ping4)), ClassEcho},
		{"ping of IPv6", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolICMP6, ping6)), ClassEcho},
		{"ping the gateway", nictest.Frame(etherIPv4, nictest.Packet4(g4, "10.0.2.2", protocolICMP, ping4)), ClassPacket},
		{"fragmented ping", nictest.Change(nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolICMP, ping4)), 14+6, 0x20), ClassFragment},
		{"other ICMP", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolICMP, nictest.Change(ping4, 0, 5))), ClassQuiet},
		{"reply to nobody", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolICMP, nictest.Change(ping4, 0, 0))), ClassQuiet},
		{"short ping", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", protocolICMP, ping4[:7])), ClassShort},
		{"ARP for the gateway", nictest.Frame(etherARP, nictest.ARP(1, guestMAC, g4, "10.0.2.2")), ClassNeighbour},
		{"ARP for the resolver", nictest.Frame(etherARP, nictest.ARP(1, guestMAC, "0.0.0.0", "10.0.2.3")), ClassNeighbour},
		{"ARP for itself", nictest.Frame(etherARP, nictest.ARP(1, guestMAC, "0.0.0.0", g4)), ClassQuiet},
		{"ARP for a sibling", nictest.Frame(etherARP, nictest.ARP(1, guestMAC, g4, "10.0.2.16")), ClassQuiet},
		{"ARP as the gateway", nictest.Frame(etherARP, nictest.ARP(2, guestMAC, "10.0.2.2", g4)), ClassForged},
		{"ARP as another card", nictest.Frame(etherARP, nictest.ARP(2, nic.MAC{2, 9}, g4, g4)), ClassForged},
		{"ARP of another kind", nictest.Frame(etherARP, nictest.Change(nictest.ARP(1, guestMAC, g4, "10.0.2.2"), 0, 9)), ClassForged},
		{"half an ARP", nictest.Frame(etherARP, nictest.ARP(1, guestMAC, g4, "10.0.2.2")[:27]), ClassShort},
		{"neighbour solicitation", nictest.Frame(etherIPv6, nictest.Packet6(g6, "ff02::1:ff00:2", protocolICMP6, solicit("fd66:6b76:6d00::2"))), ClassNeighbour},
		{"is my address mine?", nictest.Frame(etherIPv6, nictest.Packet6("::", "ff02::1:ff00:f", protocolICMP6, solicit(g6))), ClassQuiet},
		{"neighbour advertisement", nictest.Frame(etherIPv6, nictest.Packet6(g6, "ff02::1", protocolICMP6, nictest.Change(solicit(g6), 0, 136))), ClassQuiet},
		{"router solicitation", nictest.Frame(etherIPv6, nictest.Packet6("fe80::1", "ff02::2", protocolICMP6, []byte{133, 0, 0, 0, 0, 0, 0, 0})), ClassQuiet},
		{"router advertisement", nictest.Frame(etherIPv6, nictest.Packet6("fe80::1", "ff02::1", protocolICMP6, []byte{134, 0, 0, 0})), ClassForged},
		{"redirect", nictest.Frame(etherIPv6, nictest.Packet6("fe80::1", g6, protocolICMP6, []byte{137, 0, 0, 0})), ClassForged},
		{"neighbour of others", nictest.Frame(etherIPv6, nictest.Packet6("2001:db8::9", "ff02::1", protocolICMP6, solicit("fd66:6b76:6d00::2"))), ClassSource},
		{"13 bytes", good[:13], ClassShort},
		{"14 bytes", good[:14], ClassShort},
		{"IP cut off", good[:14+19], ClassShort},
		{"longer than it is", nictest.Change(good, 14+2, 0xff, 0xff), ClassShort},
		{"shorter than its header", nictest.Change(good, 14+2, 0, 19), ClassShort},
		{"version 5", nictest.Change(good, 14, 0x55), ClassShort},
		{"header of 16 bytes", nictest.Change(good, 14, 0x44), ClassShort},
		{"options", nictest.Frame(etherIPv4, options), ClassOptions},
		{"IPv6 longer than it is", nictest.Change(nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolUDP, udp)), 14+4, 0xff), ClassShort},
		{"IPv6 cut off", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolUDP, nil)[:39]), ClassShort},
		{"half a fragment header", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolFragment, make([]byte, 7))), ClassShort},
		{"hop-by-hop options", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", 0, make([]byte, 16))), ClassOptions},
		{"routing header", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", 43, make([]byte, 16))), ClassOptions},
		{"fragment header twice", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolFragment, make([]byte, 16))), ClassOptions},
		{"destination options in a fragment", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", protocolFragment, nictest.Change(make([]byte, 16), 0, 60))), ClassOptions},
		{"VLAN", nictest.Frame(0x8100, append([]byte{0, 1, 8, 0}, nictest.Packet4(g4, "8.8.8.8", protocolUDP, udp)...)), ClassEtherType},
		{"QinQ", nictest.Frame(0x88a8, make([]byte, 60)), ClassEtherType},
		{"local experiment", nictest.Frame(0x88b5, make([]byte, 60)), ClassEtherType},
		{"802.3", nictest.Frame(46, make([]byte, 46)), ClassEtherType},
		{"another card's", nictest.Change(good, 6, 2, 9, 9, 9, 9, 9), ClassStation},
		{"to another card", nictest.Change(good, 0, 2, 9, 9, 9, 9, 9), ClassStation},
		{"another address", nictest.Frame(etherIPv4, nictest.Packet4("10.0.2.16", "8.8.8.8", protocolUDP, udp)), ClassSource},
		{"another address of IPv6", nictest.Frame(etherIPv6, nictest.Packet6("2001:db8::9", "2001:db8::1", protocolUDP, udp)), ClassSource},
		{"IPIP", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", 4, good[14:])), ClassRefused},
		{"GRE", nictest.Frame(etherIPv4, nictest.Packet4(g4, "8.8.8.8", 47, make([]byte, 8))), ClassRefused},
		{"SCTP of IPv6", nictest.Frame(etherIPv6, nictest.Packet6(g6, "2001:db8::1", 132, make([]byte, 12))), ClassRefused},
		{"multicast", nictest.Frame(etherIPv4, nictest.Packet4(g4, "224.0.0.251", protocolUDP, udp)), ClassQuiet},
		{"broadcast", nictest.Change(nictest.Frame(etherIPv4, nictest.Packet4("0.0.0.0", "255.255.255.255", protocolUDP, udp)), 0, 255, 255, 255, 255, 255, 255), ClassQuiet},
		{"DHCP offer", nictest.Change(nictest.Frame(etherIPv4, nictest.Packet4("10.0.2.2", "255.255.255.255", protocolUDP, udp)), 0, 255, 255, 255, 255, 255, 255), ClassQuiet},
		{"multicast reports", nictest.Frame(etherIPv6, nictest.Packet6("fe80::1", "ff02::16", 0, make([]byte, 24))), ClassQuiet},
	}
	f := newFilter(guestMAC)
	for _, tt := range tests {
		if got := f.classify(tt.f).class; got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// FuzzSend gives the whole network frames of any content. None is read behind its end, and none that reaches the stack is from
// anybody but the guest.
func FuzzSend(f *testing.F) {
	f.Add(nictest.Frame(etherIPv4, nictest.Packet4("10.0.2.15", "8.8.8.8", protocolUDP, make([]byte, 8))), true)
	f.Add(nictest.Frame(etherIPv4, nictest.Packet4("10.0.2.15", "8.8.8.8", protocolTCP, []byte{0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0})), false)
	f.Add(nictest.Frame(etherIPv6, nictest.Packet6("fd66:6b76:6d00::f", "2001:db8::1", 43, make([]byte, 16))), false)
	f.Add(nictest.Frame(etherIPv6, nictest.Packet6("fd66:6b76:6d00::f", "2001:db8::1", protocolFragment, make([]byte, 16))), true)
	f.Add(nictest.Frame(etherARP, nictest.ARP(1, guestMAC, "10.0.2.15", "10.0.2.2")), true)
	n, err := New(Config{Guest: guestMAC, Policy: nictest.Compile(f, policy.Policy{})})
	if err != nil {
		f.Fatal(err)
	}
	defer n.Close()
	f.Fuzz(func(t *testing.T, data []byte, addressed bool) {
		if len(data) < ethernetSize || len(data) > 65549 {
			return
		}
		if addressed {
			data = nictest.Change(data, 0, append(nic.GatewayMAC[:], guestMAC[:]...)...)
		}
		v := n.filter.classify(data)
		if v.class == ClassPacket && v.guest != nic.Guest4 && v.guest != nic.Guest6 {
			t.Fatalf("a packet from %v", v.guest)
		}
		if (v.class == ClassRefused || v.class == ClassOptions || v.class == ClassFragment) && !v.guest.IsValid() {
			t.Fatal("an answer to nobody")
		}
		n.Send(nic.Frame{Data: data})
		for range 8 {
			if _, ok := n.Next(); !ok {
				break
			}
			n.Taken()
		}
	})
}

// FuzzMessage reads queries and answers.
func FuzzMessage(f *testing.F) {
	f.Add(ask(1, "a.example", typeA, 4096))
	f.Add(zone(ask(1, "many.example", typeA, 0)))
	f.Add([]byte{0, 0, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xc0, 12, 0, 1, 0, 1})
	f.Fuzz(func(t *testing.T, m []byte) {
		q, ok := readQuery(m)
		if ok && (q.end > len(m) || len(q.name) > 255) {
			t.Fatalf("question of %d bytes in %d", q.end, len(m))
		}
		if ok {
			if again, ok := readQuery(q.reply(m, 0, false)); ok && again.name != q.name {
				t.Fatalf("reply to %q is one to %q", q.name, again.name)
			}
		}
		if len(m) >= dnsHeader {
			addresses(m, query{end: dnsHeader}, func(a netip.Addr, _ time.Duration) {
				if !a.IsValid() {
					t.Fatal("no address")
				}
			})
		}
	})
}

// FuzzServerName reads what clients say first: whole, a name is the same as in pieces.
func FuzzServerName(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0, 4, 1, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		name, s := serverName(b)
		if s == namesServer && name == "" {
			t.Fatal("a server without a name")
		}
		for i := range b {
			if early, said := serverName(b[:i]); said == namesServer && (s != namesServer || early != name) {
				t.Fatalf("%q after %d bytes, %q after all", early, i, name)
			}
		}
	})
}
