package usernet

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// frame makes an Ethernet frame from the guest to the gateway.
func frame(kind uint16, packet []byte) []byte {
	f := append([]byte(nil), nic.GatewayMAC[:]...)
	f = append(f, guestMAC[:]...)
	return append(binary.BigEndian.AppendUint16(f, kind), packet...)
}

func packet4(from, to string, protocol byte, payload []byte) []byte {
	a, b := netip.MustParseAddr(from).As4(), netip.MustParseAddr(to).As4()
	p := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0}
	p = append(append(append(p, a[:]...), b[:]...), payload...)
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	return p
}

func packet6(from, to string, next byte, payload []byte) []byte {
	a, b := netip.MustParseAddr(from).As16(), netip.MustParseAddr(to).As16()
	p := []byte{0x60, 0, 0, 0, byte(len(payload) >> 8), byte(len(payload)), next, 64}
	return append(append(append(p, a[:]...), b[:]...), payload...)
}

func arpMessage(operation byte, mac nic.MAC, sender, target string) []byte {
	a, b := netip.MustParseAddr(sender).As4(), netip.MustParseAddr(target).As4()
	p := append([]byte{0, 1, 8, 0, 6, 4, 0, operation}, mac[:]...)
	p = append(append(p, a[:]...), make([]byte, 6)...)
	return append(p, b[:]...)
}

func change(b []byte, at int, v ...byte) []byte {
	b = append([]byte(nil), b...)
	copy(b[at:], v)
	return b
}

// Case D7: tricks below and in IP end here, each in its class.
func TestCaseD7Classes(t *testing.T) {
	const g4, g6 = "10.0.2.15", "fd66:6b76:6d00::f"
	udp := make([]byte, 8)
	ping4, ping6 := []byte{8, 0, 0, 0, 0, 1, 0, 2, 'x'}, []byte{128, 0, 0, 0, 0, 1, 0, 2, 'x'}
	good := frame(etherIPv4, packet4(g4, "8.8.8.8", protocolUDP, udp))
	solicit := func(target string) []byte {
		a := netip.MustParseAddr(target).As16()
		return append([]byte{135, 0, 0, 0, 0, 0, 0, 0}, a[:]...)
	}
	options := change(packet4(g4, "8.8.8.8", protocolUDP, make([]byte, 48)), 0, 0x46)
	tests := []struct {
		name string
		f    []byte
		want Class
	}{
		{"UDP", good, ClassPacket},
		{"TCP", frame(etherIPv4, packet4(g4, "8.8.8.8", protocolTCP, make([]byte, 20))), ClassPacket},
		{"UDP of IPv6", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolUDP, udp)), ClassPacket},
		{"padded", append(append([]byte(nil), good...), make([]byte, 18)...), ClassPacket},
		{"fragment", change(good, 14+6, 0x20), ClassPacket},
		{"later fragment", change(good, 14+7, 3), ClassPacket},
		{"fragment of IPv6", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolFragment, append([]byte{protocolUDP, 0, 0, 1, 0, 0, 0, 1}, udp...))), ClassPacket},
		{"ping", frame(etherIPv4, packet4(g4, "8.8.8.8", protocolICMP, ping4)), ClassEcho},
		{"ping of IPv6", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolICMP6, ping6)), ClassEcho},
		{"ping the gateway", frame(etherIPv4, packet4(g4, "10.0.2.2", protocolICMP, ping4)), ClassPacket},
		{"fragmented ping", change(frame(etherIPv4, packet4(g4, "8.8.8.8", protocolICMP, ping4)), 14+6, 0x20), ClassFragment},
		{"other ICMP", frame(etherIPv4, packet4(g4, "8.8.8.8", protocolICMP, change(ping4, 0, 5))), ClassQuiet},
		{"reply to nobody", frame(etherIPv4, packet4(g4, "8.8.8.8", protocolICMP, change(ping4, 0, 0))), ClassQuiet},
		{"short ping", frame(etherIPv4, packet4(g4, "8.8.8.8", protocolICMP, ping4[:7])), ClassShort},
		{"ARP for the gateway", frame(etherARP, arpMessage(1, guestMAC, g4, "10.0.2.2")), ClassNeighbour},
		{"ARP for the resolver", frame(etherARP, arpMessage(1, guestMAC, "0.0.0.0", "10.0.2.3")), ClassNeighbour},
		{"ARP for itself", frame(etherARP, arpMessage(1, guestMAC, "0.0.0.0", g4)), ClassQuiet},
		{"ARP for a sibling", frame(etherARP, arpMessage(1, guestMAC, g4, "10.0.2.16")), ClassQuiet},
		{"ARP as the gateway", frame(etherARP, arpMessage(2, guestMAC, "10.0.2.2", g4)), ClassForged},
		{"ARP as another card", frame(etherARP, arpMessage(2, nic.MAC{2, 9}, g4, g4)), ClassForged},
		{"ARP of another kind", frame(etherARP, change(arpMessage(1, guestMAC, g4, "10.0.2.2"), 0, 9)), ClassForged},
		{"half an ARP", frame(etherARP, arpMessage(1, guestMAC, g4, "10.0.2.2")[:27]), ClassShort},
		{"neighbour solicitation", frame(etherIPv6, packet6(g6, "ff02::1:ff00:2", protocolICMP6, solicit("fd66:6b76:6d00::2"))), ClassNeighbour},
		{"is my address mine?", frame(etherIPv6, packet6("::", "ff02::1:ff00:f", protocolICMP6, solicit(g6))), ClassQuiet},
		{"neighbour advertisement", frame(etherIPv6, packet6(g6, "ff02::1", protocolICMP6, change(solicit(g6), 0, 136))), ClassQuiet},
		{"router solicitation", frame(etherIPv6, packet6("fe80::1", "ff02::2", protocolICMP6, []byte{133, 0, 0, 0, 0, 0, 0, 0})), ClassQuiet},
		{"router advertisement", frame(etherIPv6, packet6("fe80::1", "ff02::1", protocolICMP6, []byte{134, 0, 0, 0})), ClassForged},
		{"redirect", frame(etherIPv6, packet6("fe80::1", g6, protocolICMP6, []byte{137, 0, 0, 0})), ClassForged},
		{"neighbour of others", frame(etherIPv6, packet6("2001:db8::9", "ff02::1", protocolICMP6, solicit("fd66:6b76:6d00::2"))), ClassSource},
		{"13 bytes", good[:13], ClassShort},
		{"14 bytes", good[:14], ClassShort},
		{"IP cut off", good[:14+19], ClassShort},
		{"longer than it is", change(good, 14+2, 0xff, 0xff), ClassShort},
		{"shorter than its header", change(good, 14+2, 0, 19), ClassShort},
		{"version 5", change(good, 14, 0x55), ClassShort},
		{"header of 16 bytes", change(good, 14, 0x44), ClassShort},
		{"options", frame(etherIPv4, options), ClassOptions},
		{"IPv6 longer than it is", change(frame(etherIPv6, packet6(g6, "2001:db8::1", protocolUDP, udp)), 14+4, 0xff), ClassShort},
		{"IPv6 cut off", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolUDP, nil)[:39]), ClassShort},
		{"half a fragment header", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolFragment, make([]byte, 7))), ClassShort},
		{"hop-by-hop options", frame(etherIPv6, packet6(g6, "2001:db8::1", 0, make([]byte, 16))), ClassOptions},
		{"routing header", frame(etherIPv6, packet6(g6, "2001:db8::1", 43, make([]byte, 16))), ClassOptions},
		{"fragment header twice", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolFragment, make([]byte, 16))), ClassOptions},
		{"destination options in a fragment", frame(etherIPv6, packet6(g6, "2001:db8::1", protocolFragment, change(make([]byte, 16), 0, 60))), ClassOptions},
		{"VLAN", frame(0x8100, append([]byte{0, 1, 8, 0}, packet4(g4, "8.8.8.8", protocolUDP, udp)...)), ClassEtherType},
		{"QinQ", frame(0x88a8, make([]byte, 60)), ClassEtherType},
		{"local experiment", frame(0x88b5, make([]byte, 60)), ClassEtherType},
		{"802.3", frame(46, make([]byte, 46)), ClassEtherType},
		{"another card's", change(good, 6, 2, 9, 9, 9, 9, 9), ClassStation},
		{"to another card", change(good, 0, 2, 9, 9, 9, 9, 9), ClassStation},
		{"another address", frame(etherIPv4, packet4("10.0.2.16", "8.8.8.8", protocolUDP, udp)), ClassSource},
		{"another address of IPv6", frame(etherIPv6, packet6("2001:db8::9", "2001:db8::1", protocolUDP, udp)), ClassSource},
		{"IPIP", frame(etherIPv4, packet4(g4, "8.8.8.8", 4, good[14:])), ClassRefused},
		{"GRE", frame(etherIPv4, packet4(g4, "8.8.8.8", 47, make([]byte, 8))), ClassRefused},
		{"SCTP of IPv6", frame(etherIPv6, packet6(g6, "2001:db8::1", 132, make([]byte, 12))), ClassRefused},
		{"multicast", frame(etherIPv4, packet4(g4, "224.0.0.251", protocolUDP, udp)), ClassQuiet},
		{"broadcast", change(frame(etherIPv4, packet4("0.0.0.0", "255.255.255.255", protocolUDP, udp)), 0, 255, 255, 255, 255, 255, 255), ClassQuiet},
		{"DHCP offer", change(frame(etherIPv4, packet4("10.0.2.2", "255.255.255.255", protocolUDP, udp)), 0, 255, 255, 255, 255, 255, 255), ClassQuiet},
		{"multicast reports", frame(etherIPv6, packet6("fe80::1", "ff02::16", 0, make([]byte, 24))), ClassQuiet},
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
	f.Add(frame(etherIPv4, packet4("10.0.2.15", "8.8.8.8", protocolUDP, make([]byte, 8))), true)
	f.Add(frame(etherIPv4, packet4("10.0.2.15", "8.8.8.8", protocolTCP, []byte{0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0})), false)
	f.Add(frame(etherIPv6, packet6("fd66:6b76:6d00::f", "2001:db8::1", 43, make([]byte, 16))), false)
	f.Add(frame(etherIPv6, packet6("fd66:6b76:6d00::f", "2001:db8::1", protocolFragment, make([]byte, 16))), true)
	f.Add(frame(etherARP, arpMessage(1, guestMAC, "10.0.2.15", "10.0.2.2")), true)
	n, err := New(Config{Guest: guestMAC, Policy: compile(f, policy.Policy{})})
	if err != nil {
		f.Fatal(err)
	}
	defer n.Close()
	f.Fuzz(func(t *testing.T, data []byte, addressed bool) {
		if len(data) < ethernetSize || len(data) > 65549 {
			return
		}
		if addressed {
			data = change(data, 0, append(nic.GatewayMAC[:], guestMAC[:]...)...)
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
