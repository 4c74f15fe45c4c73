package usernet

import (
	"container/list"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

const (
	// maxRefusals is how many different ones are remembered: the latest.
	maxRefusals = 256
	// maxNoted is how much of a name is.
	maxNoted = 128
)

type refusalKey struct {
	protocol, name string
	address        netip.Addr
	port           uint16
	reason         policy.Reason
}

// refusals counts what was refused, in total and by what it was.
type refusals struct {
	mu    sync.Mutex
	total uint64
	by    map[refusalKey]*list.Element
	order *list.List // of *refusal, the latest first
}

type refusal struct {
	key refusalKey
	policy.Refusal
}

func newRefusals() *refusals { return &refusals{by: map[refusalKey]*list.Element{}, order: list.New()} }

func (r *refusals) note(t *policy.Target, reason policy.Reason) {
	k := refusalKey{protocol: t.Protocol.String(), address: t.Address, port: t.Port, reason: reason}
	if len(t.Names) > 0 {
		k.name = presentable(slices.Min(t.Names))
	}
	r.count(k)
}

func (r *refusals) noteName(name string, reason policy.Reason) {
	r.count(refusalKey{protocol: "dns", name: presentable(name), reason: reason})
}

// noteFrame notes a frame that the filter lets nobody have.
func (r *refusals) noteFrame(frame []byte, v *verdict) {
	k := refusalKey{address: v.to}
	switch v.class {
	case ClassRefused:
		k.reason = policy.ReasonProtocol
	case ClassOptions:
		k.reason, k.port = policy.ReasonOptions, v.port
	case ClassFragment:
		k.reason = policy.ReasonFragment
	case ClassSource, ClassForged, ClassStation:
		k.reason, k.address = policy.ReasonForged, v.guest
	case ClassEtherType:
		k.reason = policy.ReasonProtocol
	case ClassShort:
		k.reason = policy.ReasonMalformed
	case ClassQuiet:
		if v.port == 0 {
			return // what kernels say by themselves
		}
		k.reason, k.port = policy.ReasonNobody, v.port
	default:
		return
	}
	k.protocol = carried(frame, v)
	r.count(k)
}

// carried names what a frame carries.
func carried(frame []byte, v *verdict) string {
	if v.class == ClassShort || v.class == ClassStation {
		return "ethernet" // whatever it says of itself
	}
	switch kind := binary.BigEndian.Uint16(frame[12:]); kind {
	case etherARP:
		return "arp"
	case etherIPv4, etherIPv6:
	default:
		return fmt.Sprintf("ether-%04x", kind)
	}
	switch v.protocol {
	case protocolICMP:
		return policy.ICMP.String()
	case protocolICMP6:
		return "icmp6"
	case protocolTCP:
		return policy.TCP.String()
	case protocolUDP:
		return policy.UDP.String()
	}
	return fmt.Sprintf("ip-%d", v.protocol)
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

func (r *refusals) count(k refusalKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	e := r.by[k]
	if e == nil {
		if len(r.by) >= maxRefusals {
			delete(r.by, r.order.Remove(r.order.Back()).(*refusal).key)
		}
		one := &refusal{k, policy.Refusal{Protocol: k.protocol, Port: k.port, Name: k.name, Reason: k.reason}}
		if k.address.IsValid() {
			one.Address = k.address.String()
		}
		e = r.order.PushFront(one)
		r.by[k] = e
	}
	r.order.MoveToFront(e)
	one := e.Value.(*refusal)
	one.Count++
	one.Last = time.Now()
}

// Refusals returns how often something was refused, and what: the latest first.
func (n *Net) Refusals() (total uint64, all []policy.Refusal) {
	r := n.refused
	r.mu.Lock()
	defer r.mu.Unlock()
	for e := r.order.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*refusal).Refusal)
	}
	return r.total, all
}
