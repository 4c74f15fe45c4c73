package usernet

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// maxRefusals is how many different ones are remembered: the latest.
const maxRefusals = 256

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
	by    map[refusalKey]*policy.Refusal
}

func newRefusals() *refusals { return &refusals{by: map[refusalKey]*policy.Refusal{}} }

func (r *refusals) note(t *policy.Target, reason policy.Reason) {
	k := refusalKey{protocol: t.Protocol.String(), address: t.Address, port: t.Port, reason: reason}
	if len(t.Names) > 0 {
		k.name = slices.Min(t.Names)
	}
	r.count(k)
}

func (r *refusals) noteName(name string, reason policy.Reason) {
	r.count(refusalKey{protocol: "dns", name: name, reason: reason})
}

func (r *refusals) count(k refusalKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	one := r.by[k]
	if one == nil {
		if len(r.by) >= maxRefusals {
			r.forgetOldestLocked()
		}
		one = &policy.Refusal{Protocol: k.protocol, Port: k.port, Name: k.name, Reason: k.reason}
		if k.address.IsValid() {
			one.Address = k.address.String()
		}
		r.by[k] = one
	}
	one.Count++
	one.Last = time.Now()
}

func (r *refusals) forgetOldestLocked() {
	var oldest refusalKey
	var last time.Time
	for k, one := range r.by {
		if last.IsZero() || one.Last.Before(last) {
			oldest, last = k, one.Last
		}
	}
	delete(r.by, oldest)
}

// list returns the latest first.
func (r *refusals) list() (total uint64, list []policy.Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.by {
		list = append(list, *one)
	}
	slices.SortFunc(list, func(a, b policy.Refusal) int { return b.Last.Compare(a.Last) })
	return r.total, list
}

// Refusals returns how often something was refused, and what: the latest first.
func (n *Net) Refusals() (total uint64, list []policy.Refusal) { return n.refused.list() }
