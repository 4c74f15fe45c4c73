package usernet

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/testkit"
)

// BenchmarkPolicy is what keeping a guest to its policy costs: for a connection or a pair of UDP addresses, each frame of the guest,
// and each time that bytes are moved.
func BenchmarkPolicy(b *testing.B) {
	testkit.RequireKVM(b) // counted in the lab, beside what a connection costs there
	server := netip.MustParseAddrPort("93.184.216.34:443")
	long := allow()
	for i := range 1023 {
		long.Allow = append(long.Allow, fmt.Sprintf("9.%d.%d.0/24:%d-%d", i/256, i%256, 1000+i, 2000+i))
	}
	long.Allow = append(long.Allow, server.String())
	for name, p := range map[string]policy.Policy{
		"public": {Mode: policy.Public}, "address": allow(server.String()), "name": allow("*.example:443"), "1024-entries": long,
	} {
		b.Run("connection/"+name, func(b *testing.B) {
			n := newNet(b, Config{Policy: nictest.Compile(b, p)})
			n.pins.add("good.example", server.Addr(), time.Hour)
			for b.Loop() {
				if t := (policy.Target{Protocol: policy.TCP, Address: server.Addr(), Port: server.Port()}); !n.decide(&t).Allowed {
					b.Fatal("refused")
				}
			}
		})
	}
	hello := clientHello(b, "good.example")
	b.Run("server-name", func(b *testing.B) {
		n := newNet(b, Config{Policy: nictest.Compile(b, allow("*.example:443"))})
		t := policy.Target{Protocol: policy.TCP, Address: server.Addr(), Port: server.Port()}
		for b.Loop() {
			if name, s := serverName(hello); s != namesServer || !n.rules.Load().Serves(t, name) {
				b.Fatal("refused")
			}
		}
	})
	n := newNet(b, Config{Policy: nictest.Compile(b, limited(policy.Limits{Bytes: 1 << 62, Rate: 1 << 62}, server.String()))})
	for name, frame := range map[string][]byte{"ipv4": segment(n, server.Addr()), "ipv6": segment(n, elsewhere6)} {
		b.Run("frame/"+name, func(b *testing.B) {
			for b.Loop() {
				v := n.filter.classify(frame)
				n.filter.counts[v.class].Add(1)
				n.refused.noteFrame(frame, &v)
				if v.class != ClassPacket {
					b.Fatal(v.class)
				}
			}
		})
	}
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			if limits := n.rules.Load().Limits(); n.meters.spent(limits) || n.meters.sent.add(copyBuffer, limits.Rate) > 0 {
				b.Fatal("held back")
			}
		}
	})
}

// segment is a frame of the guest's with an empty segment of TCP.
func segment(n *Net, to netip.Addr) []byte {
	from := nic.Guest4
	if to.Is6() {
		from = nic.Guest6
	}
	frame := n.packet(protocolTCP, from, to, make([]byte, 20))
	copy(frame, nic.GatewayMAC[:])
	copy(frame[6:], n.config.Guest[:])
	return frame
}
