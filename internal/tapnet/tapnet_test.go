package tapnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/devices/nic/tap"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/testkit"
)

// requireTap skips the test where there are no TAP devices.
func requireTap(t testing.TB) {
	t.Helper()
	testkit.RequireRoot(t)
	if _, err := exec.LookPath("ip"); err != nil {
		testkit.Require(t, "tap", "needs ip: install iproute2")
	}
	for _, missing := range []error{privileged(), unix.Access(tunPath, unix.R_OK|unix.W_OK)} {
		if missing != nil {
			testkit.Require(t, "tap", "needs TAP devices: "+missing.Error())
		}
	}
}

// ip runs commands of ip(8), one after the other, up to the first that fails.
func ip(commands ...string) error {
	for _, c := range commands {
		if out, err := exec.Command("ip", strings.Fields(c)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", c, err, out)
		}
	}
	return nil
}

// Addresses of the world.
const (
	world4 = "93.184.216.34"
	world6 = "2606:2800:220:1::34"
)

// world is two network namespaces: a host, and one beside it with servers.
type world struct {
	host       *os.File
	space      *os.File
	names      atomic.Int64
	classifier bool
	uplink     uint16
}

// newWorld makes it the only one that the host has a way to. The test is skipped where there can be none.
func newWorld(t testing.TB) *world {
	t.Helper()
	requireTap(t)
	w := &world{}
	t.Cleanup(func() { linux.CloseFiles(w.host, w.space) })
	if err := w.make(); err != nil {
		testkit.Require(t, "tap", "needs network namespaces with veth and IPv6: "+err.Error())
	}
	var unavailable *UnavailableError
	if err := linux.InNetwork(w.host, tryCreate); errors.As(err, &unavailable) {
		testkit.Require(t, "tap", err.Error())
	} else if err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) make() (err error) {
	const loopback = "link set lo up"
	if w.space, err = linux.NewNetwork(func() error { return ip(loopback) }); err != nil {
		return err
	}
	if w.host, err = linux.NewNetwork(func() error {
		if err := set([2]string{"ipv4/ip_forward", "1"}, [2]string{"ipv6/conf/all/forwarding", "1"}); err != nil {
			return err
		}
		return ip(loopback, "link add out type veth peer name in", fmt.Sprintf("link set in netns /proc/%d/fd/%d", os.Getpid(), w.space.Fd()),
			"addr add 93.184.216.1/24 dev out", "addr add 2606:2800:220:1::1/64 dev out nodad", "link set out up")
	}); err != nil {
		return err
	}
	if err := linux.InNetwork(w.space, func() error {
		return ip("addr add "+world4+"/24 dev in", "addr add "+world6+"/64 dev in nodad", "link set in up")
	}); err != nil {
		return err
	}
	return linux.InNetwork(w.host, func() error { return ip("route add default via "+world4, "-6 route add default via "+world6) })
}

func tryCreate() error {
	n, err := Create(Config{Name: "try", MTU: 1500})
	if err != nil {
		return err
	}
	return n.Close()
}

func (w *world) in(t testing.TB, space *os.File, do func() error) {
	t.Helper()
	if err := linux.InNetwork(space, do); err != nil {
		t.Fatal(err)
	}
}

func address6(six bool) string {
	if six {
		return world6
	}
	return world4
}

func (w *world) ListenTCP(t testing.TB, six bool) (l net.Listener, at netip.AddrPort) {
	t.Helper()
	w.in(t, w.space, func() (err error) {
		l, err = net.Listen("tcp", net.JoinHostPort(address6(six), "0"))
		return err
	})
	return l, netip.MustParseAddrPort(l.Addr().String())
}

func (w *world) ListenUDP(t testing.TB, six bool) (c net.PacketConn, at netip.AddrPort) {
	t.Helper()
	w.in(t, w.space, func() (err error) {
		c, err = net.ListenPacket("udp", net.JoinHostPort(address6(six), "0"))
		return err
	})
	return c, netip.MustParseAddrPort(c.LocalAddr().String())
}

// network is a network as its guest's process and whoever started that have it.
type network struct {
	*tap.Net
	t       testing.TB
	space   *os.File
	control *Control
}

func policyOf(r *policy.Rules) Policy {
	limits := r.Limits()
	return Policy{r.Regions(policy.Surroundings{}), r.Mode() == policy.Public, limits.Rate, limits.Bytes, limits.Packets}
}

// in opens a namespace anew.
func in(space *os.File) Space {
	return func() (*os.File, error) { return os.Open(fmt.Sprintf("/proc/self/fd/%d", space.Fd())) }
}

func (n *network) SetPolicy(r *policy.Rules) {
	if err := n.control.SetPolicy(in(n.space), policyOf(r)); err != nil {
		n.t.Error(err)
	}
	n.Net.SetPolicy(r)
}

func (n *network) Suspend() {
	if err := n.control.Suspend(in(n.space)); err != nil {
		n.t.Error(err)
	}
}

func (n *network) Resume() {
	if err := n.control.Resume(); err != nil {
		n.t.Error(err)
	}
}

func (w *world) name() string { return fmt.Sprint("test", w.names.Add(1)) }

func (w *world) New(t testing.TB, rules *policy.Rules) nictest.Network {
	t.Helper()
	var made *Network
	c := Config{Name: w.name(), MTU: 1500, classifier: w.classifier, uplink: w.uplink}
	w.in(t, w.host, func() (err error) {
		w.eventually(t, "the way out is another's", func() bool {
			made, err = Create(c)
			return !errors.Is(err, unix.EEXIST)
		})
		return err
	})
	n := &network{t: t, space: made.Space}
	w.in(t, w.host, func() (err error) {
		n.control, err = Claim(c, made.Record)
		return err
	})
	if err := n.control.Admit(in(n.space), nictest.Card, policyOf(rules)); err != nil {
		t.Fatal(err)
	}
	var err error
	n.Net, err = tap.New(tap.Config{
		Tap: made.Tap, Counts: made.Counts, Events: made.Events, Guest: nictest.Card, Policy: rules, Names: made.Record.Names(), IPv6: made.Record.IPv6,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		n.Net.Close()
		n.control.Close()
		n.space.Close()
	})
	return n
}

func TestContract(t *testing.T) {
	nictest.Run(t, newWorld(t))
}
