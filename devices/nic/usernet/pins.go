package usernet

import (
	"net/netip"
	"sync"
	"time"
)

const (
	maxPins = 8192 // addresses
	// A guest uses an answer a little later than it was made.
	minPin = time.Minute
	maxPin = 24 * time.Hour
	// maxNames is how many names one address may have.
	maxNames = 64
)

// pins are the addresses that the guest's resolver has answered for names: for as long as the answer may be kept.
type pins struct {
	mu   sync.Mutex
	now  func() time.Time
	byIP map[netip.Addr]map[string]time.Time // when each name ends
}

func newPins() *pins { return &pins{now: time.Now, byIP: map[netip.Addr]map[string]time.Time{}} }

// add notes an answer. When there are too many, others are forgotten, ended ones first.
func (p *pins) add(name string, a netip.Addr, ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a = a.Unmap()
	names := p.byIP[a]
	if names == nil {
		if len(p.byIP) >= maxPins {
			p.makeRoomLocked()
		}
		names = map[string]time.Time{}
		p.byIP[a] = names
	}
	if _, known := names[name]; !known && len(names) >= maxNames {
		for other := range names {
			delete(names, other)
			break
		}
	}
	if end := p.now().Add(min(max(ttl, minPin), maxPin)); end.After(names[name]) {
		names[name] = end
	}
}

func (p *pins) makeRoomLocked() {
	now := p.now()
	for a, names := range p.byIP {
		for name, end := range names {
			if end.Before(now) {
				delete(names, name)
			}
		}
		if len(names) == 0 {
			delete(p.byIP, a)
		}
	}
	// So much that it need not be done for each of many.
	for a := range p.byIP {
		if len(p.byIP) <= maxPins-maxPins/8 {
			return
		}
		delete(p.byIP, a)
	}
}

// names returns the names that an address was answered for.
func (p *pins) names(a netip.Addr) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []string
	now := p.now()
	for name, end := range p.byIP[a.Unmap()] {
		if end.After(now) {
			list = append(list, name)
		}
	}
	return list
}

func (p *pins) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.byIP)
}
