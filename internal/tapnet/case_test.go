package tapnet

import (
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic/nictest"
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
	dead := make(chan *Network, rounds*at)
	for range rounds {
		var all sync.WaitGroup
		for range at {
			all.Go(func() {
				var n *Network
				w.in(t, w.host, func() (err error) {
					n, err = Create(Config{Name: w.name(), MTU: 1500})
					return err
				})
				if err := n.Admit(nictest.Card, policyOf(rules)); err != nil {
					t.Error(err)
				}
				n.Close() // all that a killed process and its launcher do
				dead <- n
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
			c, err := Open(n.name, n.Maps)
			if err == nil {
				c.Close()
			}
			return errors.Is(err, ErrGone)
		})
	}
}

func (w *world) eventually(t testing.TB, otherwise string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(nictest.Patience); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(otherwise)
		}
	}
}

// What is on record of a network that is gone, or another's, leads nowhere.
func TestOpenRefuses(t *testing.T) {
	w := newWorld(t)
	var one, two *Network
	for _, n := range []**Network{&one, &two} {
		w.in(t, w.host, func() (err error) {
			*n, err = Create(Config{Name: w.name(), MTU: 1500})
			return err
		})
		defer (*n).Close()
	}
	for _, ids := range []Maps{{}, two.Maps, {one.Maps.Settings, two.Maps.Policies}, {one.Maps.Policies, one.Maps.Settings}, {1 << 30, 1 << 30}} {
		if c, err := Open(one.name, ids); !errors.Is(err, ErrGone) {
			t.Errorf("%v: %v", ids, err)
			if err == nil {
				c.Close()
			}
		}
	}
	c, err := Open(one.name, one.Maps)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Suspend(two.Space); !errors.Is(err, ErrGone) {
		t.Errorf("suspended in another's namespace: %v", err)
	}
	if err := c.Suspend(one.Space); err != nil {
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
