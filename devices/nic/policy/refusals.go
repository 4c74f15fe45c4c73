package policy

import (
	"container/list"
	"fmt"
	"sync"
	"time"
)

// maxRefusals is how many different ones are remembered: the latest.
const maxRefusals = 256

// Refusals counts what a guest was refused, in total and by what it was. It may be used from any goroutine.
type Refusals struct {
	mu    sync.Mutex
	total uint64
	by    map[Refusal]*list.Element // by what they are, without Count and Last
	order *list.List                // of *noted, the latest first
}

type noted struct{ key, so Refusal }

// NewRefusals returns an empty one.
func NewRefusals() *Refusals { return &Refusals{by: map[Refusal]*list.Element{}, order: list.New()} }

// Note counts a refusal once more, whatever its Count and Last are.
func (r *Refusals) Note(key Refusal) {
	key.Count, key.Last = 0, time.Time{}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	e := r.by[key]
	if e == nil {
		if len(r.by) >= maxRefusals {
			delete(r.by, r.order.Remove(r.order.Back()).(*noted).key)
		}
		e = r.order.PushFront(&noted{key, key})
		r.by[key] = e
	}
	r.order.MoveToFront(e)
	so := &e.Value.(*noted).so
	so.Count++
	so.Last = time.Now()
}

// List returns how often something was refused, and what: the latest first.
func (r *Refusals) List() (total uint64, all []Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for e := r.order.Front(); e != nil; e = e.Next() {
		all = append(all, e.Value.(*noted).so)
	}
	return r.total, all
}

// Carried names what a frame carries for Refusal.Protocol: by its type, and the protocol of an IP packet.
func Carried(etherType uint16, protocol byte) string {
	switch etherType {
	case 0x0806:
		return "arp"
	case 0x0800, 0x86dd:
	default:
		return fmt.Sprintf("ether-%04x", etherType)
	}
	switch protocol {
	case 1:
		return ICMP.String()
	case 58:
		return "icmp6"
	case 6:
		return TCP.String()
	case 17:
		return UDP.String()
	}
	return fmt.Sprintf("ip-%d", protocol)
}
