package tapnet

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/internal/linux"
)

// TestClassifier: kernels without tcx have the same programs elsewhere.
func TestClassifier(t *testing.T) {
	w := newWorld(t)
	w.classifier = true
	nictest.Echo(t, w)
	nictest.Refused(t, w)
}

// left is how many networks the host has interfaces of.
func (w *world) left(t testing.TB) (count int) {
	t.Helper()
	w.in(t, w.host, func() error {
		list, err := net.Interfaces()
		for _, i := range list {
			if strings.HasPrefix(i.Name, hostPrefix) {
				count++
			}
		}
		return err
	})
	return count
}

// Case D9: networks that were just let go of, as by processes that were killed, are in nobody's way, not even of one that has the
// addresses of one of them, and nothing is left of them.
func TestCaseD9(t *testing.T) {
	const rounds, at = 2, 10
	w := newWorld(t)
	rules := nictest.Allow(t, world4)
	type gone struct {
		name   string
		record Record
	}
	dead := make(chan gone, rounds*at)
	for range rounds {
		var all sync.WaitGroup
		for range at {
			all.Go(func() {
				n, name := w.create(t, Config{})
				c, err := Open(name, n.Record)
				if err == nil {
					err = c.Admit(in(n.Space), nictest.Card, policyOf(rules))
					c.Close()
				}
				if err != nil {
					t.Error(err)
				}
				n.Close() // all that a killed process and its launcher do
				dead <- gone{name, n.Record}
			})
		}
		all.Wait()
		w.uplink = 7 // of the round before, which had a connection when it ended
		t.Run("another", func(t *testing.T) { nictest.Echo(t, w) })
	}
	w.eventually(t, "interfaces are left", func() bool { return w.left(t) == 0 })
	close(dead)
	for n := range dead {
		w.eventually(t, "maps are left", func() bool {
			c, err := Open(n.name, n.record)
			if err == nil {
				c.Close()
			}
			return errors.Is(err, ErrGone)
		})
	}
}

func (w *world) eventually(t testing.TB, otherwise string, done func() bool) {
	t.Helper()
	// The kernel clears namespaces away one after the other, behind whatever else it has to.
	for end := time.Now().Add(3 * nictest.Patience); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(otherwise)
		}
	}
}

// create makes a network on the host, and returns its name.
func (w *world) create(t testing.TB, c Config) (n *Network, name string) {
	t.Helper()
	c.Name, c.MTU = w.name(), 1500
	w.in(t, w.host, func() (err error) {
		n, err = Create(c)
		return err
	})
	return n, c.Name
}

// A network that was made ahead is claimed only if it is what would be made now, and all of it is there.
func TestClaimRefuses(t *testing.T) {
	w := newWorld(t)
	resolver := netip.MustParseAddrPort("9.9.9.9:53")
	for what, test := range map[string]struct {
		change func(*Network, *Config) error
		want   error
	}{
		"nothing has changed":     {func(*Network, *Config) error { return nil }, nil},
		"another resolver":        {func(_ *Network, c *Config) error { c.Resolver = resolver; return nil }, ErrStale},
		"another build":           {func(n *Network, _ *Config) error { n.Record.Source = "other"; return nil }, ErrStale},
		"a way of IPv6 went":      {func(n *Network, _ *Config) error { n.Record.Leads6 = !n.Record.Leads6; return nil }, ErrStale},
		"the way out was removed": {func(n *Network, _ *Config) error { return linkDo(n.Record.Uplink, (*netlink.Handle).LinkDel) }, ErrGone},
		"the way out is down":     {func(n *Network, _ *Config) error { return linkDo(n.Record.Uplink, (*netlink.Handle).LinkSetDown) }, ErrGone},
		"another's way out":       {func(n *Network, _ *Config) error { n.Record.Uplink = 1; return nil }, ErrGone},
		"the TAP was removed": {func(n *Network, _ *Config) error {
			return linux.InNetwork(n.Space, func() error { return ip("link del " + tapName) })
		}, ErrGone},
		"another's maps": {func(n *Network, _ *Config) error { n.Record.Policies = n.Record.Settings; return nil }, ErrGone},
	} {
		n, name := w.create(t, Config{})
		c := Config{Name: name, MTU: 1500}
		w.in(t, w.host, func() error { return test.change(n, &c) })
		w.eventually(t, what, func() bool { // maps go some time after what they belong to
			var control *Control
			var err error
			w.in(t, w.host, func() error { control, err = Claim(c, n.Record); return nil })
			if control != nil {
				control.Close()
			}
			return errors.Is(err, test.want)
		})
		n.Close()
	}
}

// Every rate that a policy can have is one that the kernel takes.
func TestRates(t *testing.T) {
	w := newWorld(t)
	n, name := w.create(t, Config{})
	defer n.Close()
	c, err := Open(name, n.Record)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p := policyOf(nictest.Allow(t, world4))
	for _, p.Rate = range []uint64{0, 1 << 10, 100_000, 1 << 30, 1 << 33, fastest, fastest + 1, 1<<64 - 1, 5_000_000, 0} {
		if err := c.SetPolicy(in(n.Space), p); err != nil {
			t.Errorf("%d bytes a second: %v", p.Rate, err)
		}
	}
	p.Rate = 1 << 20
	other, _ := w.create(t, Config{})
	defer other.Close()
	if err := c.SetPolicy(in(other.Space), p); !errors.Is(err, ErrGone) {
		t.Errorf("a rate in another's namespace: %v", err)
	}
}

// linkDo does something with an interface of the calling thread's namespace.
func linkDo(index int, do func(*netlink.Handle, netlink.Link) error) error {
	nl, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	defer nl.Close()
	link, err := nl.LinkByIndex(index)
	if err != nil {
		return err
	}
	return do(nl, link)
}

// What is on record of a network that is gone, or another's, leads nowhere.
func TestOpenRefuses(t *testing.T) {
	w := newWorld(t)
	one, name := w.create(t, Config{})
	defer one.Close()
	two, _ := w.create(t, Config{})
	defer two.Close()
	maps := func(settings, policies uint32) Record { return Record{Settings: settings, Policies: policies} }
	own, other := one.Record, two.Record
	for _, r := range []Record{{}, other, maps(own.Settings, other.Policies), maps(own.Policies, own.Settings), maps(1<<30, 1<<30)} {
		if c, err := Open(name, r); !errors.Is(err, ErrGone) {
			t.Errorf("%+v: %v", r, err)
			if err == nil {
				c.Close()
			}
		}
	}
	c, err := Open(name, one.Record)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Suspend(in(two.Space)); !errors.Is(err, ErrGone) {
		t.Errorf("suspended in another's namespace: %v", err)
	}
	if err := c.Suspend(in(one.Space)); err != nil {
		t.Error(err)
	}
}

func TestCreateRefuses(t *testing.T) {
	w := newWorld(t)
	w.in(t, w.host, func() error {
		for _, name := range []string{"", "a name that is too long"} {
			if n, err := Create(Config{Name: name, MTU: 1500}); err == nil {
				t.Errorf("%q: accepted", name)
				n.Close()
			}
		}
		return set([2]string{"ipv4/ip_forward", "0"})
	})
	w.in(t, w.host, func() error {
		n, err := Create(Config{Name: "a", MTU: 1500})
		var unavailable *UnavailableError
		if !errors.As(err, &unavailable) || !strings.Contains(err.Error(), "ip_forward") {
			t.Errorf("on a host that passes nothing on: %v", err)
		}
		if n != nil {
			n.Close()
		}
		return nil
	})
}
