package main

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/forkvm/forkvm/internal/testkit/attempt"
)

// Addresses on the guest's link.
const (
	own4     = "10.0.2.15"
	own6     = "fd66:6b76:6d00::f"
	gateway4 = "10.0.2.2"
	gateway6 = "fd66:6b76:6d00::2"
)

// rst is what comes of a SYN to a public address, at a port of names.
const rst = "rst/no_network rst/not_allowed rst/not_allowed synack"

// asFrames are what only a program with raw sockets sends. Where nothing comes back nothing has to.
func asFrames() []try {
	frames := func(name, record, want string, all ...attempt.Frame) try {
		return try{name: name, Attempt: attempt.Attempt{Kind: attempt.Frames, Frames: all}, record: record, want: want, below: belowNames[want]}
	}
	raw := func(kind uint16, payload []byte) attempt.Frame {
		return attempt.Frame{Source: attempt.Own, Destination: attempt.Gateway, Type: kind, Payload: payload}
	}
	packet := func(p attempt.Packet) attempt.Frame {
		if p.From == "" {
			p.From = own4
			if strings.Contains(p.To, ":") {
				p.From = own6
			}
		}
		return attempt.To(p.Encode())
	}
	syn := func(to string, flags byte) []byte {
		from := own4
		if strings.Contains(to, ":") {
			from = own6
		}
		return attempt.Segment(from, to, 80, flags)
	}
	segment := func(to string, flags byte) attempt.Frame {
		return packet(attempt.Packet{To: to, Protocol: 6, Payload: syn(to, flags)})
	}
	const (
		other  = "icmp-3-13/protocol"
		other6 = "icmp6-1-1/protocol"
	)
	all := []try{
		frames("a SYN", "tcp 193.0.1.1:80", rst, segment("193.0.1.1", 2)),
		frames("a SYN of IPv6", "tcp [2621::2]:80", rst, segment("2621::2", 2)),
		frames("a SYN to a neighbour through the gateway", "tcp 10.0.2.16:80", "rst/special_address", segment("10.0.2.16", 2)),
		frames("an ACK out of nothing", "tcp 193.0.1.2:80", "rst", segment("193.0.1.2", 16)),
		frames("a segment without flags", "", "rst", segment("193.0.1.3", 0)),
		frames("SYN and FIN", "tcp 193.0.1.4:80", rst, segment("193.0.1.4", 3)),
		frames("a segment with all flags", "", "silent", segment("193.0.1.7", 0x3f)),
		frames("FIN, PSH, URG", "", "rst", segment("193.0.1.5", 0x29)),
		frames("a RST", "", "silent", segment("193.0.1.6", 4)),
		frames("a SYN to loopback", "", "silent", segment("127.0.0.1", 2)),
		frames("a SYN to nobody", "", "silent", segment("0.0.0.0", 2)),
		frames("a SYN to a mapped address", "", "silent", segment("::ffff:169.254.169.254", 2)),
		frames("a SYN to a neighbour's link address", "tcp [fe80::1]:80", "rst/no_network rst/special_address", segment("fe80::1", 2)),
	}
	for _, p := range []struct {
		name     string
		protocol byte
	}{{"GRE", 47}, {"IPIP", 4}, {"SCTP", 132}, {"ESP", 50}, {"IPv6 in IPv4", 41}, {"UDP-Lite", 136}, {"DCCP", 33}, {"OSPF", 89}} {
		inner := attempt.Packet{From: own4, To: "169.254.169.254", Protocol: 6, Payload: syn("169.254.169.254", 2)}.Encode()
		all = append(all, frames(p.name, fmt.Sprintf("ip-%d 20.1.1.1", p.protocol), other, packet(attempt.Packet{To: "20.1.1.1", Protocol: p.protocol, Payload: inner})))
	}
	big := make([]byte, 1200)
	datagram := attempt.Datagram(own4, "20.1.1.1", 7, make([]byte, 1000))
	forbidden := attempt.Datagram(own4, "193.0.2.1", 5000, make([]byte, 1000))
	part := func(to string, whole []byte, from, until int) attempt.Frame {
		more := uint16(0x2000)
		if until == len(whole) {
			more = 0
		}
		return packet(attempt.Packet{To: to, Protocol: 17, Fragment: more | uint16(from/8), Payload: whole[from:until]})
	}
	const udpBy = "icmp-3-3/no_network icmp-3-3/not_allowed udp"
	all = append(all,
		frames("a datagram in fragments", "udp 20.1.1.1:7", udpBy, part("20.1.1.1", datagram, 0, 504), part("20.1.1.1", datagram, 504, len(datagram))),
		frames("fragments of 8 bytes", "udp 193.0.2.1:5000", "icmp-3-3/no_network icmp-3-3/not_allowed icmp-3-3/not_allowed udp",
			part("193.0.2.1", forbidden, 0, 8), part("193.0.2.1", forbidden, 8, 16), part("193.0.2.1", forbidden, 16, len(forbidden))),
		frames("fragments without the first", "", "silent", part("193.0.2.2", forbidden, 8, 512), part("193.0.2.2", forbidden, 512, len(forbidden))),
		frames("fragments that overlap", "", "silent",
			part("193.0.2.3", forbidden, 0, 512), part("193.0.2.3", forbidden, 256, 768), part("193.0.2.3", forbidden, 768, len(forbidden))),
		frames("a fragment of TCP without its ports", "", "silent", packet(attempt.Packet{To: "193.0.2.4", Protocol: 6, Fragment: 0x2000, Payload: syn("193.0.2.4", 2)[:8]})),
		frames("fragments of an echo request", "icmp 20.1.1.1", "icmp-3-13/fragment", packet(attempt.Packet{To: "20.1.1.1", Protocol: 1, Fragment: 0x2000, Payload: big[:64]})),
		frames("an echo request", "icmp 20.1.1.1", "icmp-3-13/no_network icmp-3-13/not_allowed icmp-0-0",
			packet(attempt.Packet{To: "20.1.1.1", Protocol: 1, Payload: attempt.Message(own4, "20.1.1.1", 8, 0, append([]byte{0, 7, 0, 1}, big[:56]...)...)})),
		frames("an echo request full of data", "icmp 193.0.3.1", "icmp-3-13/no_network icmp-3-13/not_allowed icmp-3-13/not_allowed icmp-0-0",
			packet(attempt.Packet{To: "193.0.3.1", Protocol: 1, Payload: attempt.Message(own4, "193.0.3.1", 8, 0, append([]byte{0, 8, 0, 1}, big...)...)})),
		frames("an echo request of IPv6", "icmp 2621::3", "icmp6-1-1/no_network icmp6-1-1/not_allowed icmp6-1-1/not_allowed icmp6-129-0",
			packet(attempt.Packet{To: "2621::3", Protocol: 58, Payload: attempt.Message(own6, "2621::3", 128, 0, append([]byte{0, 9, 0, 1}, big[:56]...)...)})),
		frames("an echo request to the metadata", "icmp 169.254.169.254", "icmp-3-13/no_network icmp-3-13/special_address",
			packet(attempt.Packet{To: "169.254.169.254", Protocol: 1, Payload: attempt.Message(own4, "169.254.169.254", 8, 0, 0, 7, 0, 1)})),
		frames("a timestamp request", "", "silent", packet(attempt.Packet{To: "20.1.1.1", Protocol: 1, Payload: attempt.Message(own4, "20.1.1.1", 13, 0, big[:16]...)})),
		frames("a redirect", "", "silent", packet(attempt.Packet{To: gateway4, Protocol: 1, Payload: attempt.Message(own4, gateway4, 5, 1, big[:32]...)})),
		frames("a source route", "tcp 20.1.1.1:80", "icmp-3-13/ip_options",
			packet(attempt.Packet{To: "20.1.1.1", Protocol: 6, Options: []byte{0x83, 7, 4, 169, 254, 169, 254}, Payload: syn("20.1.1.1", 2)})),
		frames("a strict source route", "tcp 20.1.1.1:80", "icmp-3-13/ip_options",
			packet(attempt.Packet{To: "20.1.1.1", Protocol: 6, Options: []byte{0x89, 7, 4, 10, 1, 2, 3}, Payload: syn("20.1.1.1", 2)})),
		frames("a record of the route", "tcp 20.1.1.1:80", "icmp-3-13/ip_options",
			packet(attempt.Packet{To: "20.1.1.1", Protocol: 6, Options: append([]byte{7, 39, 4}, big[:36]...), Payload: syn("20.1.1.1", 2)})),
		frames("a routing header", "ip-43 2620:1::1", "icmp6-1-1/ip_options",
			packet(attempt.Packet{To: "2620:1::1", Protocol: 43, Payload: append([]byte{6, 0, 0, 0, 0, 0, 0, 0}, syn("2620:1::1", 2)...)})),
		frames("options for every hop", "ip-0 2620:1::1", "icmp6-1-1/ip_options",
			packet(attempt.Packet{To: "2620:1::1", Protocol: 0, Payload: append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, syn("2620:1::1", 2)...)})),
		frames("a chain of extension headers", "ip-60 2620:1::1", "icmp6-1-1/ip_options",
			packet(attempt.Packet{To: "2620:1::1", Protocol: 60, Payload: append([]byte{
				60, 0, 1, 4, 0, 0, 0, 0, 60, 0, 1, 4, 0, 0, 0, 0, 60, 0, 1, 4, 0, 0, 0, 0, 60, 0, 1, 4, 0, 0, 0, 0, 6, 0, 1, 4, 0, 0, 0, 0,
			}, syn("2620:1::1", 2)...)})),
		frames("SCTP of IPv6", "ip-132 2620:1::1", other6, packet(attempt.Packet{To: "2620:1::1", Protocol: 132, Payload: big[:32]})),
		frames("another source", "tcp 10.0.2.16", "silent/forged", packet(attempt.Packet{From: "10.0.2.16", To: "20.1.1.1", Protocol: 6, Payload: attempt.Segment("10.0.2.16", "20.1.1.1", 80, 2)})),
		frames("another source of IPv6", "tcp fd66:6b76:6d00::10", "silent/forged",
			packet(attempt.Packet{From: "fd66:6b76:6d00::10", To: "2620:1::1", Protocol: 6, Payload: attempt.Segment("fd66:6b76:6d00::10", "2620:1::1", 80, 2)})),
		frames("the gateway as source", "udp "+gateway4, "silent/forged", packet(attempt.Packet{From: gateway4, To: "20.1.1.1", Protocol: 17, Payload: attempt.Datagram(gateway4, "20.1.1.1", 7, big[:8])})),
		frames("another card as source", "ethernet", "silent/forged",
			attempt.Frame{Source: "02:00:00:00:00:99", Destination: attempt.Gateway, Type: 0x0800, Payload: attempt.Packet{From: own4, To: "20.1.1.1", Protocol: 6, Payload: syn("20.1.1.1", 2)}.Encode()}),
		frames("ARP: the gateway is here", "arp "+gateway4, "silent/forged", raw(0x0806, arp(2, gateway4, own4))),
		frames("ARP: a neighbour is here", "arp 10.0.2.16", "silent/forged", raw(0x0806, arp(2, "10.0.2.16", gateway4))),
		frames("ARP to everybody: the resolver is here", "arp 10.0.2.3", "silent/forged",
			attempt.Frame{Source: attempt.Own, Destination: attempt.Broadcast, Type: 0x0806, Payload: arp(1, "10.0.2.3", "10.0.2.3")}),
		frames("a neighbour's advertisement for the gateway", "icmp6", "silent/forged",
			packet(attempt.Packet{To: gateway6, Protocol: 58, Payload: attempt.Message(own6, gateway6, 136, 0, append([]byte{0x20, 0, 0, 0}, encoded(gateway6)...)...)})),
		frames("a router's advertisement", "icmp6", "silent/forged", packet(attempt.Packet{To: gateway6, Protocol: 58, Payload: attempt.Message(own6, gateway6, 134, 0, make([]byte, 12)...)})),
		frames("a router's redirect", "icmp6", "silent/forged", packet(attempt.Packet{To: gateway6, Protocol: 58, Payload: attempt.Message(own6, gateway6, 137, 0, make([]byte, 36)...)})),
		frames("a DHCP offer", "udp 255.255.255.255:68", "silent/no_station",
			packet(attempt.Packet{To: "255.255.255.255", Protocol: 17, Payload: attempt.Datagram(own4, "255.255.255.255", 68, big[:240])})),
		frames("a broadcast to the link", "udp 10.0.2.255:5000", "silent/no_station",
			attempt.Frame{Source: attempt.Own, Destination: attempt.Broadcast, Type: 0x0800, Payload: attempt.Packet{From: own4, To: "10.0.2.255", Protocol: 17, Payload: attempt.Datagram(own4, "10.0.2.255", 5000, big[:8])}.Encode()}),
		frames("a VLAN", "ether-8100", "silent/protocol", raw(0x8100, append([]byte{0, 7, 8, 0}, attempt.Packet{From: own4, To: "20.1.1.1", Protocol: 6, Payload: syn("20.1.1.1", 2)}.Encode()...))),
		frames("a VLAN in a VLAN", "ether-88a8", "silent/protocol", raw(0x88a8, append([]byte{0, 7, 0x81, 0, 0, 8, 8, 0}, big[:40]...))),
		frames("an experiment", "ether-88b5", "silent/protocol", raw(0x88b5, big[:64])),
		frames("PPPoE", "ether-8864", "silent/protocol", raw(0x8864, big[:64])),
		frames("spanning trees", "ether-0026", "silent/protocol", attempt.Frame{Source: attempt.Own, Destination: "01:80:c2:00:00:00", Type: 0x26, Payload: big[:38]}),
		frames("a frame of nothing", "", "silent/malformed", raw(0x0800, nil)),
		frames("a packet that says it is longer", "", "silent/malformed", raw(0x0800, attempt.Packet{From: own4, To: "20.1.1.1", Protocol: 6, Payload: syn("20.1.1.1", 2)}.Encode()[:30])),
		frames("a header of 60 bytes in a packet of 24", "", "silent/malformed", raw(0x0800, append([]byte{0x4f}, attempt.Packet{From: own4, To: "20.1.1.1", Protocol: 6, Payload: big[:4]}.Encode()[1:]...))),
	)
	byTap := map[string]string{
		// The kernel puts nothing together that it refuses: the first fragment is on record, and nobody answers.
		"a datagram in fragments":      "silent/no_network silent/not_allowed udp",
		"fragments of 8 bytes":         "silent/no_network silent/not_allowed silent/not_allowed udp",
		"fragments of an echo request": "silent/no_network silent/not_allowed silent",
		// It answers no protocol that may have a checksum where it looks for one and finds another.
		"IPIP": "silent/protocol", "IPv6 in IPv4": "silent/protocol", "OSPF": "silent/protocol",
		// Begins no connection for conntrack.
		"SYN and FIN": "rst/no_network rst/not_allowed rst/not_allowed rst",
		// Whoever is asked to refuse it does.
		"a SYN to nobody": "rst",
	}
	for i := range all {
		all[i].byTap = byTap[all[i].name]
		switch all[i].name {
		case "a source route", "a VLAN", "fragments of 8 bytes", "another source":
			all[i].brief = true
		}
	}
	return all
}

// arp makes a message that says who has an address.
func arp(operation byte, sender, target string) []byte {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, operation}, "OWNMAC"...)
	b = append(append(b, encoded(sender)...), make([]byte, 6)...)
	return append(b, encoded(target)...)
}

func encoded(a string) []byte { return netip.MustParseAddr(a).AsSlice() }
