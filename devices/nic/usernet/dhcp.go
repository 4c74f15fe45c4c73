package usernet

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/forkvm/forkvm/devices/nic"
)

// DHCP (RFC 2131): where fields are, and the numbers of messages and options (RFC 2132).
const (
	dhcpServerPort = 67
	dhcpClientPort = 68

	bootRequest = 1
	bootReply   = 2
	bootClient  = 12 // ciaddr
	bootYours   = 16 // yiaddr
	bootCard    = 28 // chaddr
	bootCookie  = 236
	bootOptions = 240
	bootMinimum = 300 // some clients take nothing shorter (RFC 1542, section 2.1)

	dhcpDiscover = 1
	dhcpOffer    = 2
	dhcpRequest  = 3
	dhcpAck      = 5
	dhcpNak      = 6
	dhcpInform   = 8

	optionMask      = 1
	optionRouter    = 3
	optionResolver  = 6
	optionMTU       = 26
	optionRequested = 50
	optionLease     = 51
	optionMessage   = 53
	optionServer    = 54
	optionEnd       = 255
)

var dhcpCookie = [4]byte{99, 130, 83, 99}

// dhcpLease is how long a guest may keep its address, in seconds; nobody else wants it.
const dhcpLease = 24 * 60 * 60

// dhcpQuery is what a client asks for.
type dhcpQuery struct {
	message byte
	wants   netip.Addr // the address that it has or has been offered; not valid if it names none
	server  netip.Addr // the server that it means
}

// readDHCP reads a client's message.
func readDHCP(m []byte, card nic.MAC) (q dhcpQuery, ok bool) {
	if len(m) < bootOptions || m[0] != bootRequest || m[1] != 1 || m[2] != 6 || nic.MAC(m[bootCard:bootCard+6]) != card ||
		[4]byte(m[bootCookie:]) != dhcpCookie {
		return q, false
	}
	if own := netip.AddrFrom4([4]byte(m[bootClient:])); !own.IsUnspecified() {
		q.wants = own
	}
	for o := (reader{m[bootOptions:]}); len(o.rest) > 0; {
		kind := o.number(1)
		if kind == 0 {
			continue
		}
		if kind == optionEnd {
			break
		}
		value := o.vector8()
		switch {
		case kind == optionMessage && len(value) == 1:
			q.message = value[0]
		case kind == optionRequested && len(value) == 4:
			q.wants = netip.AddrFrom4([4]byte(value))
		case kind == optionServer && len(value) == 4:
			q.server = netip.AddrFrom4([4]byte(value))
		}
	}
	return q, q.message != 0
}

// dhcpAnswer says what a client gets: the guest's address, whatever it was before.
func (n *Net) dhcpAnswer(m []byte) []byte {
	q, ok := readDHCP(m, n.config.Guest)
	if !ok || q.server.IsValid() && q.server != nic.Gateway4 {
		return nil
	}
	var message byte
	switch q.message {
	case dhcpDiscover:
		message = dhcpOffer
	case dhcpRequest:
		message = dhcpAck
		if q.wants != nic.Guest4 {
			message = dhcpNak
		}
	case dhcpInform:
		message = dhcpAck
	default:
		return nil
	}
	a := make([]byte, bootOptions, bootMinimum)
	copy(a, m[:bootOptions])
	a[0] = bootReply
	clear(a[8:12])                    // time since the client began, and flags
	clear(a[bootYours:bootCard])      // its, the next server's and the relay's address
	clear(a[bootCard+6 : bootCookie]) // names of servers and files
	option := func(kind byte, value ...byte) { a = append(append(a, kind, byte(len(value))), value...) }
	option(optionMessage, message)
	option(optionServer, nic.Gateway4.AsSlice()...)
	if message != dhcpNak {
		if q.message != dhcpInform {
			copy(a[bootYours:], nic.Guest4.AsSlice())
			option(optionLease, binary.BigEndian.AppendUint32(nil, dhcpLease)...)
		}
		option(optionMask, 255, 255, 255, 0)
		option(optionRouter, nic.Gateway4.AsSlice()...)
		option(optionResolver, nic.Resolver4.AsSlice()...)
		option(optionMTU, binary.BigEndian.AppendUint16(nil, uint16(n.config.MTU))...)
	}
	a = append(a, optionEnd)
	return append(a, make([]byte, max(0, bootMinimum-len(a)))...)
}

// dhcp answers a client. Before it has an address it hears what is for everybody.
func (n *Net) dhcp(message []byte) {
	answer := n.dhcpAnswer(message)
	if answer == nil {
		return
	}
	to := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	u := header.UDP(make([]byte, header.UDPMinimumSize, header.UDPMinimumSize+len(answer)))
	u.Encode(&header.UDPFields{SrcPort: dhcpServerPort, DstPort: dhcpClientPort, Length: uint16(header.UDPMinimumSize + len(answer))})
	u = append(u, answer...)
	sum := header.PseudoHeaderChecksum(header.UDPProtocolNumber, address(nic.Gateway4), address(to), uint16(len(u)))
	u.SetChecksum(^checksum.Checksum(u, sum))
	n.link.enqueue(outbound{frame: n.packet(header.UDPProtocolNumber, nic.Gateway4, to, u)})
}

// isDHCP says whether a packet is a client's message to whatever server there is: whole, and from the address that it has or
// has not yet.
func isDHCP(from, to netip.Addr, protocol byte, fragment bool, payload []byte) bool {
	return protocol == protocolUDP && !fragment && len(payload) >= header.UDPMinimumSize &&
		binary.BigEndian.Uint16(payload) == dhcpClientPort && binary.BigEndian.Uint16(payload[2:]) == dhcpServerPort &&
		(from.IsUnspecified() || from == nic.Guest4) && (to == nic.Gateway4 || to == netip.AddrFrom4([4]byte{255, 255, 255, 255}))
}
