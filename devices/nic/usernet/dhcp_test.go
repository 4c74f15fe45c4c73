package usernet

import (
	"bytes"
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// bootMessage makes a client's message.
func bootMessage(message byte, options ...byte) []byte {
	m := make([]byte, bootOptions)
	m[0], m[1], m[2] = bootRequest, 1, 6
	copy(m[4:], "id..")
	copy(m[bootCard:], guestMAC[:])
	copy(m[bootCookie:], dhcpCookie[:])
	return append(append(m, optionMessage, 1, message), append(options, optionEnd)...)
}

func TestDHCP(t *testing.T) {
	n, err := New(Config{Guest: guestMAC, MTU: 1400, Policy: nictest.Compile(t, policy.Policy{})})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	wants := func(last byte) []byte { return []byte{optionRequested, 4, 10, 0, 2, last} }
	has := bootMessage(dhcpRequest)
	copy(has[bootClient:], nic.Guest4.AsSlice())
	for _, c := range []struct {
		name   string
		ask    []byte
		answer byte // 0: none
	}{
		{"a discovery", bootMessage(dhcpDiscover), dhcpOffer},
		{"a request", bootMessage(dhcpRequest, wants(15)...), dhcpAck},
		{"a request for another address", bootMessage(dhcpRequest, wants(16)...), dhcpNak},
		{"a request of another server", bootMessage(dhcpRequest, append(wants(15), optionServer, 4, 10, 0, 2, 9)...), 0},
		{"a renewal", has, dhcpAck},
		{"a question", bootMessage(dhcpInform), dhcpAck},
		{"a release", bootMessage(7), 0},
		{"another card's", nictest.Change(bootMessage(dhcpDiscover), bootCard, 2, 9), 0},
		{"an answer", nictest.Change(bootMessage(dhcpDiscover), 0, bootReply), 0},
		{"no cookie", nictest.Change(bootMessage(dhcpDiscover), bootCookie, 0), 0},
		{"a short one", bootMessage(dhcpDiscover)[:100], 0},
		{"an option without its end", append(bootMessage(dhcpDiscover)[:bootOptions], optionMessage, 9, dhcpDiscover), 0},
	} {
		udp := append([]byte{0, dhcpClientPort, 0, dhcpServerPort, 0, 0, 0, 0}, c.ask...)
		f := nictest.Frame(etherIPv4, nictest.Packet4("0.0.0.0", "255.255.255.255", protocolUDP, udp))
		n.Send(nic.Frame{Data: nictest.Change(f, 0, 255, 255, 255, 255, 255, 255)})
		reply, ok := n.Next()
		if !ok {
			if c.answer != 0 {
				t.Errorf("%s: no answer", c.name)
			}
			continue
		}
		data := bytes.Clone(reply.Data)
		n.Taken()
		u, m := header.UDP(data[ethernetSize+ipv4Size:]), data[ethernetSize+ipv4Size+8:]
		if from, to := address(nic.Gateway4), address(netip.AddrFrom4([4]byte{255, 255, 255, 255})); !u.IsChecksumValid(from, to, checksum.Checksum(m, 0)) {
			t.Errorf("%s: the answer's checksum is wrong", c.name)
		}
		if c.answer == 0 || m[0] != bootReply || string(m[4:8]) != "id.." || m[bootOptions+2] != c.answer || len(m) < bootMinimum {
			t.Errorf("%s: the answer is %x", c.name, m)
		}
		if yours := netip.AddrFrom4([4]byte(m[bootYours:])); c.answer == dhcpOffer && yours != nic.Guest4 {
			t.Errorf("%s: the address is %v", c.name, yours)
		}
		if mtu := []byte{optionMTU, 2, 1400 >> 8, 1400 & 255}; bytes.Contains(m, mtu) != (c.answer != dhcpNak) {
			t.Errorf("%s: the options are %x", c.name, m[bootOptions:])
		}
	}
}

// FuzzDHCP reads what clients ask: whatever it is, an answer is one, to the same question.
func FuzzDHCP(f *testing.F) {
	f.Add(bootMessage(dhcpDiscover))
	f.Add(bootMessage(dhcpRequest, optionRequested, 4, 10, 0, 2, 15))
	n, err := New(Config{Guest: guestMAC, Policy: nictest.Compile(f, policy.Policy{})})
	if err != nil {
		f.Fatal(err)
	}
	defer n.Close()
	f.Fuzz(func(t *testing.T, m []byte) {
		if a := n.dhcpAnswer(m); a != nil && (len(a) < bootMinimum || len(a) > 576 || !bytes.Equal(a[4:8], m[4:8]) || a[0] != bootReply) {
			t.Fatalf("the answer to %x is %x", m, a)
		}
	})
}
