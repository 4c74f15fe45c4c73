package tap

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// Class is what the programs make of a frame of the guest: enum class of internal/tapnet/tap.c.
type Class uint8

// The classes, and what else is counted.
const (
	ClassPacket Class = iota
	ClassNeighbour
	ClassPolicy // refused by the policy
	ClassRefused
	ClassQuiet
	ClassShort
	ClassEtherType
	ClassStation
	ClassSource
	ClassForged
	ClassOptions
	ClassFragment
	ClassSpent
	ClassExcess
	bytesFrom
	bytesTo
	strays
	counted

	classes = bytesFrom
)

func (c Class) String() string {
	if c >= classes {
		return "unknown"
	}
	return [classes]string{
		"packet", "neighbour", "policy", "refused", "quiet", "short", "ether_type", "station", "source", "forged", "options", "fragment", "limit", "excess",
	}[c]
}

// Names of what is counted beside the classes.
const (
	frameStray = "stray" // for the guest, which it may not have
	frameLost  = "lost"  // that the device did not take: it is full, or gone
)

// Status says what has become of what the guest tried.
func (n *Net) Status() policy.Status {
	n.noteEvents()
	s := policy.Status{Frames: map[string]uint64{}, SentBytes: n.counts.read(bytesFrom), ReceivedBytes: n.counts.read(bytesTo)}
	note := func(name string, k uint64) {
		if k > 0 {
			s.Frames[name] = k
		}
	}
	for c := range classes {
		k := n.counts.read(c)
		note(c.String(), k)
		if c != ClassPacket && c != ClassNeighbour && c != ClassQuiet && c != ClassExcess {
			s.Refused += k
		}
	}
	note(frameStray, n.counts.read(strays))
	note(frameLost, n.lost.Load())
	_, s.Refusals = n.refused.List()
	n.mu.Lock()
	s.Connections = len(n.flows)
	n.mu.Unlock()
	return s
}

// eventSize is that of struct event.
const eventSize = 24

// noteEvents takes what the programs have told since the last time.
func (n *Net) noteEvents() {
	n.events.take(func(b []byte) {
		if len(b) >= eventSize {
			n.refused.Note(n.refusal(b))
		}
	})
}

// refusal reads struct event.
func (n *Net) refusal(b []byte) policy.Refusal {
	ne := binary.NativeEndian
	address := netip.AddrFrom16([16]byte(b[:16])).Unmap()
	port, ether, class, protocol := ne.Uint16(b[16:]), ne.Uint16(b[18:]), Class(b[20]), b[21]
	r := policy.Refusal{Protocol: policy.Carried(ether, protocol), Port: port}
	if !address.IsUnspecified() || ether == etherIPv4 || ether == etherIPv6 {
		r.Address = address.String()
	}
	switch class {
	case ClassPolicy:
		r.Reason = n.reason(policy.Target{Protocol: protocolOf(protocol), Address: address, Port: port})
		r.Protocol = protocolOf(protocol).String()
	case ClassRefused, ClassEtherType:
		r.Reason = policy.ReasonProtocol
	case ClassQuiet:
		r.Reason = policy.ReasonNobody
	case ClassStation, ClassSource, ClassForged:
		r.Reason = policy.ReasonForged
	case ClassOptions:
		r.Reason = policy.ReasonOptions
	case ClassFragment:
		r.Reason = policy.ReasonFragment
	case ClassSpent:
		r.Reason, r.Protocol = policy.ReasonLimit, protocolOf(protocol).String()
	default:
		r.Reason = policy.ReasonMalformed
	}
	if class == ClassShort || class == ClassStation {
		r.Protocol, r.Address = "ethernet", "" // whatever it says of itself
	}
	return r
}

// reason says why the policy refuses a target.
func (n *Net) reason(t policy.Target) policy.Reason {
	if nic.OnLink(t.Address) {
		return policy.ReasonSpecial // the gateway serves nothing but names
	}
	t.Host = func(a netip.Addr) bool { return slices.Contains(n.config.Host, a) }
	if v := n.rules.Load().Decide(t); !v.Allowed {
		return v.Reason
	}
	return policy.ReasonNotAllowed // under the policy of then
}

// protocolOf is one of IP as policies have it.
func protocolOf(number byte) policy.Protocol {
	switch number {
	case protocolTCP:
		return policy.TCP
	case 17:
		return policy.UDP
	}
	return policy.ICMP
}
