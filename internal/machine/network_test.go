package machine

import (
	"encoding/json"
	"net/netip"
	"sync"
	"testing"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// ears are a network that answers nothing and knows who has sent how many frames.
type ears struct {
	mu     sync.Mutex
	heard  map[nic.MAC]uint64
	closed bool
}

func (e *ears) Send(f nic.Frame) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.heard == nil {
		e.heard = map[nic.MAC]uint64{}
	}
	e.heard[nic.MAC(f.Data[6:12])]++
}

// from is how many frames somebody has sent, and how many all have.
func (e *ears) from(card nic.MAC) (own, all uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, n := range e.heard {
		all += n
	}
	return e.heard[card], all
}

func (e *ears) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	return nil
}

func (e *ears) Addressing() nic.Addressing {
	return nic.Addressing{
		Addresses: []netip.Prefix{netip.PrefixFrom(nic.Guest4, nic.Bits4)}, Gateways: []netip.Addr{nic.Gateway4}, Resolvers: []netip.Addr{nic.Resolver4},
	}
}

func (e *ears) Attach(func())                  {}
func (e *ears) SetOffloads(nic.Offloads)       {}
func (e *ears) Next() (nic.Frame, bool)        { return nic.Frame{}, false }
func (e *ears) Taken()                         {}
func (e *ears) Save() (json.RawMessage, error) { return nil, nil }
func (e *ears) Restore(json.RawMessage) error  { return nil }
func (e *ears) SetPolicy(*policy.Rules)        {}
func (e *ears) Renewed()                       {}
func (e *ears) Status() policy.Status          { return policy.Status{} }

// plug gives a machine that is to be built a network, if it has a card.
func plug(t *testing.T, c *Config, id Identity) {
	t.Helper()
	if c.Shape.NetworkMTU == 0 {
		return
	}
	var err error
	if c.MAC, err = id.CardAddress(); err != nil {
		t.Fatal(err)
	}
	c.Network = &ears{}
}
