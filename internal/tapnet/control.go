package tapnet

import (
	"fmt"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/internal/linux"
)

// Control changes a network that is in use.
type Control struct {
	name string
	maps *maps
}

// Open finds a network by its name and by what is on record of it, which need not be trusted. It is ErrGone if it has ended.
func Open(name string, r Record) (*Control, error) {
	m, err := openMaps(name, r)
	if err != nil {
		return nil, fmt.Errorf("open network (%s): %w", name, err)
	}
	return &Control{name, m}, nil
}

// Close gives back what Open has taken. The network stays.
func (c *Control) Close() { c.maps.close() }

// Space opens a network's own namespace, or what somebody who need not be trusted says is it.
type Space func() (*os.File, error)

// Admit lets a guest use a network that nobody uses: the card's address, and what it may reach.
func (c *Control) Admit(space Space, card nic.MAC, p Policy) error {
	err := c.set(space, p)
	if err == nil {
		err = c.maps.change(func(s *settings) { s.MAC, s.Open = card, 1 })
	}
	if err != nil {
		return fmt.Errorf("admit guest (%s): %w", c.name, err)
	}
	return nil
}

// SetPolicy replaces what the guest may reach, at once: what is open and is not allowed any more ends with its next packet.
func (c *Control) SetPolicy(space Space, p Policy) error {
	if err := c.set(space, p); err != nil {
		return fmt.Errorf("set policy of network (%s): %w", c.name, err)
	}
	return nil
}

func (c *Control) set(space Space, p Policy) error {
	if p.Rate > fastest {
		p.Rate = 0
	}
	s, err := c.maps.read()
	if err == nil && s.Rate != p.Rate {
		err = c.within(space, s, func() error { return setRate(p.Rate) })
	}
	if err != nil {
		return explain(err)
	}
	return c.maps.setPolicy(p)
}

// within calls do in the network's namespace. It is ErrGone if that is another one.
func (c *Control) within(space Space, s settings, do func() error) error {
	f, err := space()
	if err != nil {
		return err
	}
	defer f.Close()
	at, err := number(f)
	if err != nil {
		return err
	}
	if s.Space != at {
		return ErrGone
	}
	return linux.InNetwork(f, do)
}

// Suspend refuses everything and forgets all connections, until Resume: for a guest that begins another life.
func (c *Control) Suspend(space Space) error {
	if err := c.suspend(space); err != nil {
		return fmt.Errorf("suspend network (%s): %w", c.name, err)
	}
	return nil
}

func (c *Control) suspend(space Space) error {
	var now settings
	if err := c.maps.change(func(s *settings) {
		s.Open = 0
		now = *s
	}); err != nil {
		return err
	}
	return c.within(space, now, forget)
}

// forget drops all connections that the calling thread's namespace knows of.
func forget() error {
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		return fmt.Errorf("forget connections: %w", err)
	}
	return nil
}

// Resume lets the policy count again.
func (c *Control) Resume() error {
	if err := c.maps.change(func(s *settings) { s.Open = 1 }); err != nil {
		return fmt.Errorf("resume network (%s): %w", c.name, err)
	}
	return nil
}
