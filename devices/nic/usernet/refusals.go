package usernet

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// maxNoted is how much of a name is remembered.
const maxNoted = 128

// refusals counts what was refused.
type refusals struct{ *policy.Refusals }

func newRefusals() refusals { return refusals{policy.NewRefusals()} }

func (r refusals) note(t *policy.Target, reason policy.Reason) {
	k := policy.Refusal{Protocol: t.Protocol.String(), Address: t.Address.String(), Port: t.Port, Reason: reason}
	if len(t.Names) > 0 {
		k.Name = presentable(slices.Min(t.Names))
	}
	r.Note(k)
}

func (r refusals) noteName(name string, reason policy.Reason) {
	r.Note(policy.Refusal{Protocol: "dns", Name: presentable(name), Reason: reason})
}

// noteFrame notes a frame that the filter lets nobody have.
func (r refusals) noteFrame(frame []byte, v *verdict) {
	var k policy.Refusal
	address := v.to
	switch v.class {
	case ClassRefused:
		k.Reason = policy.ReasonProtocol
	case ClassOptions:
		k.Reason, k.Port = policy.ReasonOptions, v.port
	case ClassFragment:
		k.Reason = policy.ReasonFragment
	case ClassSource, ClassForged, ClassStation:
		k.Reason, address = policy.ReasonForged, v.guest
	case ClassEtherType:
		k.Reason = policy.ReasonProtocol
	case ClassShort:
		k.Reason = policy.ReasonMalformed
	case ClassQuiet:
		if v.port == 0 {
			return // what kernels say by themselves
		}
		k.Reason, k.Port = policy.ReasonNobody, v.port
	default:
		return
	}
	k.Protocol = carried(frame, v)
	if address.IsValid() {
		k.Address = address.String()
	}
	r.Note(k)
}

// carried names what a frame carries.
func carried(frame []byte, v *verdict) string {
	if v.class == ClassShort || v.class == ClassStation {
		return "ethernet" // whatever it says of itself
	}
	return policy.Carried(binary.BigEndian.Uint16(frame[12:]), v.protocol)
}

// presentable returns the beginning of a name that a guest has made up, with what is no part of a host name as the domain name
// system writes it (RFC 4343, section 2.1).
func presentable(name string) string {
	var b strings.Builder
	for i := range len(name) {
		if b.Len() >= maxNoted {
			b.WriteString("...")
			break
		}
		switch c := name[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_', c == '.', c == '*':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, `\%03d`, c)
		}
	}
	return b.String()
}

// Refusals returns how often something was refused, and what: the latest first.
func (n *Net) Refusals() (total uint64, all []policy.Refusal) { return n.refused.List() }
