package tapnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/internal/linux"
)

// Config says what a network is made of.
type Config struct {
	// Name is the network's, by which it is known in the kernel: up to 14 of a-z and 0-9.
	Name string
	// MTU is that of the guest's card.
	MTU int
	// Resolver, if it has an address of IPv4 that is not this host's alone, is who answers at the address of the guest's resolver.
	Resolver netip.AddrPort
	// classifier attaches the programs as for a kernel without tcx, and uplink is the number of the way out if it is not 0: for tests.
	classifier bool
	uplink     uint16
}

// Network is a network that nobody uses yet. Whoever has the files keeps it.
type Network struct {
	// Space is the network namespace in which the VM's process has to be started, Tap the device, and Counts and Events maps for
	// whoever has the device: what became of frames, and what was refused.
	Space, Tap, Counts, Events *os.File
	// Record is what others need to find it.
	Record Record
}

const maxName = 14

// linkUp is how long the kernel may take until a link that is there passes packets, and an address answers: a moment, but it waits for
// its lock of all links, which ends of other networks hold for seconds on a busy host.
const linkUp = 30 * time.Second

// Create makes a network, in which nothing is allowed until Control.Admit. Errors are *UnavailableError if this host, or this user, can have none.
func Create(c Config) (*Network, error) {
	if len(c.Name) == 0 || len(c.Name) > maxName {
		return nil, fmt.Errorf("create network (%s): the name is none", c.Name)
	}
	if err := Available(); err != nil {
		return nil, err
	}
	n, err := create(c)
	if err != nil {
		return nil, fmt.Errorf("create network (%s): %w", c.Name, explain(err))
	}
	return n, nil
}

func create(c Config) (n *Network, err error) {
	if err := prepareHost(); err != nil {
		return nil, err
	}
	// The kernel waits for itself when it takes the rules; its verifier can work meanwhile.
	programs := sync.OnceValues(func() (*ebpf.Collection, error) { return load(c.Name) })
	go programs()
	defer func() {
		if p, err := programs(); err == nil {
			p.Close()
		}
	}()
	host, err := linux.OwnNetwork()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	n = &Network{Record: newRecord(c.Resolver)}
	var up *uplink
	n.Space, err = linux.NewNetwork(func() (err error) {
		n.Record.IPv6 = hasIPv6()
		if n.Tap, err = makeTap(); err != nil {
			return err
		}
		up, err = makeUplink(host, c)
		return err
	})
	if err == nil {
		n.Record.Uplink, err = up.connect()
	}
	if err == nil {
		err = linux.InNetwork(n.Space, func() error { return n.configure(c, programs, up) })
	}
	if err == nil {
		err = connected(n.Record.Uplink, time.Now().Add(linkUp))
	}
	if err == nil {
		err = n.keep(programs)
	}
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// configure makes the namespace the guest's gateway.
func (n *Network) configure(c Config, programs func() (*ebpf.Collection, error), up *uplink) error {
	if err := setTable("forkvm", guestChains(n.Record.Resolver)); err != nil {
		return err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	tap, err := nl.LinkByName(tapName)
	if err != nil {
		return fmt.Errorf("find interface (%s): %w", tapName, err)
	}
	loaded, err := programs()
	if err != nil {
		return err
	}
	// Before the device is up: not one frame passes without them.
	if err := attach(nl, loaded, tap.Attrs().Index, c.classifier); err != nil {
		return err
	}
	if err := n.setParameters(); err != nil {
		return err
	}
	if err := forget(); err != nil { // there is nothing to be forgotten yet: a kernel that cannot is one too late in a reset
		return err
	}
	if err := configureTap(nl, tap, c.MTU, n.Record.IPv6); err != nil {
		return err
	}
	if err := up.configure(nl, n.Record.IPv6, n.Record.Leads6); err != nil || !n.Record.IPv6 {
		return err
	}
	return answering(tapName, nic.Gateway6, nic.Resolver6)
}

// sessionIdle is after how many seconds without a packet of UDP or ICMP the answer is a stranger's.
const sessionIdle = "30"

// setParameters makes the namespace a router that believes nobody, and for which a segment in the middle of a connection does
// not begin one.
func (n *Network) setParameters() error {
	err := set([2]string{"ipv4/ip_forward", "1"}, [2]string{"ipv4/conf/all/accept_redirects", "0"}, [2]string{"ipv4/conf/all/send_redirects", "0"},
		[2]string{"ipv4/conf/tap0/send_redirects", "0"}, [2]string{"ipv4/icmp_ratelimit", "0"}, [2]string{"netfilter/nf_conntrack_tcp_loose", "0"},
		[2]string{"netfilter/nf_conntrack_udp_timeout", sessionIdle}, [2]string{"netfilter/nf_conntrack_udp_timeout_stream", sessionIdle},
		[2]string{"netfilter/nf_conntrack_icmp_timeout", sessionIdle}, [2]string{"netfilter/nf_conntrack_icmpv6_timeout", sessionIdle})
	if err != nil || !n.Record.IPv6 {
		return err
	}
	return set([2]string{"ipv6/conf/all/forwarding", "1"}, [2]string{"ipv6/conf/all/accept_redirects", "0"}, [2]string{"ipv6/conf/all/accept_ra", "0"},
		[2]string{"ipv6/conf/tap0/accept_dad", "0"}, [2]string{"ipv6/conf/tap0/addr_gen_mode", "1"}, [2]string{"ipv6/conf/uplink/accept_dad", "0"},
		[2]string{"ipv6/conf/uplink/addr_gen_mode", "1"}, [2]string{"ipv6/icmp/ratelimit", "0"})
}

// keep notes the namespace's number and opens the maps for those who are to have them.
func (n *Network) keep(loaded func() (*ebpf.Collection, error)) error {
	programs, err := loaded()
	if err != nil {
		return err
	}
	m := &maps{settings: programs.Maps[settingsMap], policies: programs.Maps[policiesMap]}
	space, err := number(n.Space)
	if err != nil {
		return err
	}
	if err := m.change(func(s *settings) {
		s.Space = space
		if n.Record.Names() {
			s.Resolver = 1
		}
	}); err != nil {
		return err
	}
	if n.Counts, err = fileOf(programs.Maps[countsMap]); err != nil {
		return err
	}
	if n.Events, err = fileOf(programs.Maps[eventsMap]); err != nil {
		return err
	}
	if n.Record.Settings, err = idOf(m.settings); err != nil {
		return err
	}
	n.Record.Policies, err = idOf(m.policies)
	return err
}

func fileOf(m *ebpf.Map) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(m.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), m.String()), nil
}

func idOf(m *ebpf.Map) (uint32, error) {
	info, err := m.Info()
	if err != nil {
		return 0, fmt.Errorf("read what the kernel says of a map: %w", err)
	}
	id, ok := info.ID()
	if !ok {
		return 0, unavailable(errors.New("maps of this kernel have no number"), "Linux 5.14 or later is needed")
	}
	return uint32(id), nil
}

// Close gives all descriptors back. A network that nobody else has ends with that. It is idempotent.
func (n *Network) Close() (err error) {
	for _, f := range []**os.File{&n.Space, &n.Tap, &n.Counts, &n.Events} {
		if *f != nil {
			err = errors.Join(err, (*f).Close())
			*f = nil
		}
	}
	return err
}
