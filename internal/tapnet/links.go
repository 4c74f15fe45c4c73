package tapnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/internal/linux"
)

// Cards on both ends of the wire between a namespace and the host, which nobody else is on, and what the namespace takes the guest's
// card for: the programs write its address.
func uplinkMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 'f', 'k', 'v', 'm', 1} }
func hostMAC() net.HardwareAddr   { return net.HardwareAddr{0x02, 'f', 'k', 'v', 'm', 2} }
func guestMAC() net.HardwareAddr  { return net.HardwareAddr{0x02, 'f', 'k', 'v', 'm', 3} }

// makeTap makes the device in the calling thread's namespace. It ends with its descriptor.
func makeTap() (*os.File, error) {
	fd, err := unix.Open(tunPath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", tunPath, err)
	}
	if err := linux.CreateTap(fd, tapName); err != nil {
		unix.Close(fd)
		return nil, explain(err)
	}
	// Only now: without a device there is nothing that Go's poller could wait for.
	return os.NewFile(uintptr(fd), tunPath), nil
}

// configureTap makes the TAP the gateway of the guest, whose place is known.
func configureTap(nl *netlink.Handle, tap netlink.Link, mtu int, six bool) error {
	if err := nl.LinkSetMTU(tap, mtu); err != nil {
		return fmt.Errorf("set MTU of %s: %w", tapName, err)
	}
	if err := nl.LinkSetHardwareAddr(tap, nic.GatewayMAC[:]); err != nil {
		return fmt.Errorf("set address of %s: %w", tapName, err)
	}
	stations := []station{
		{netip.PrefixFrom(nic.Gateway4, nic.Bits4), nic.Guest4}, {netip.PrefixFrom(nic.Resolver4, 32), netip.Addr{}},
		{netip.PrefixFrom(nic.Gateway6, nic.Bits6), nic.Guest6}, {netip.PrefixFrom(nic.Resolver6, 128), netip.Addr{}},
	}
	return addStations(nl, tap, guestMAC(), six, stations)
}

// station is an address of ours and, if valid, that of the one at the other end of the wire.
type station struct {
	own   netip.Prefix
	other netip.Addr
}

// addStations brings a link up, with its addresses and those of the other end, which is not asked for them.
func addStations(nl *netlink.Handle, link netlink.Link, other net.HardwareAddr, six bool, stations []station) error {
	name := link.Attrs().Name
	if err := nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	for _, s := range stations {
		if s.own.Addr().Is6() && !six {
			continue
		}
		a := &netlink.Addr{IPNet: ipNet(s.own)}
		if s.own.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := nl.AddrAdd(link, a); err != nil {
			return fmt.Errorf("add address %v to %s: %w", s.own, name, err)
		}
		if !s.other.IsValid() {
			continue
		}
		if err := nl.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: s.other.AsSlice(), HardwareAddr: other}); err != nil {
			return fmt.Errorf("add neighbour %v to %s: %w", s.other, name, err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// uplink is a namespace's way out: a pair of interfaces, one of which is the host's. The name of that is what nobody else can
// have, so that its addresses are nobody else's.
type uplink struct {
	number uint16
}

func (u *uplink) hostName() string { return fmt.Sprintf("%s%d", hostPrefix, u.number) }

// ends are the host's address and the namespace's.
func (u *uplink) ends(six bool) (host, inner netip.Addr) {
	at := uint32(u.number) * 2
	base := uplinks4.Addr().AsSlice()
	if six {
		base = uplinks6.Addr().AsSlice()
	}
	for i, n := len(base)-1, at; n > 0; i, n = i-1, n>>8 {
		base[i] += byte(n)
	}
	host, _ = netip.AddrFromSlice(base)
	return host, host.Next()
}

// attempts is how many numbers are tried: with a tenth of them in use that is enough.
const attempts = 64

// makeUplink makes the pair, this end of it in the calling thread's namespace.
func makeUplink(host *os.File, c Config) (*uplink, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	for range attempts {
		u := &uplink{number: c.uplink}
		if c.uplink == 0 {
			u.number = uint16(rand.Uint32())
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = uplinkName, c.MTU, uplinkMAC()
		err = nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: u.hostName(), PeerHardwareAddr: hostMAC(), PeerNamespace: netlink.NsFd(int(host.Fd())), PeerMTU: uint32(c.MTU)})
		if err == nil {
			return u, nil
		}
		if !errors.Is(err, unix.EEXIST) {
			break
		}
	}
	return nil, explain(fmt.Errorf("create interfaces (%s): %w", uplinkName, err))
}

// configure brings this end up, in the calling thread's namespace.
func (u *uplink) configure(nl *netlink.Handle, six, leads6 bool) error {
	link, err := nl.LinkByName(uplinkName)
	if err != nil {
		return fmt.Errorf("find interface (%s): %w", uplinkName, err)
	}
	if err := addStations(nl, link, hostMAC(), six, u.stations(false)); err != nil {
		return err
	}
	for _, family := range []bool{false, true} {
		if family && !(six && leads6) {
			continue // the guest hears at once that there is no way
		}
		gateway, _ := u.ends(family)
		if err := nl.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice()}); err != nil {
			return fmt.Errorf("add route by %v: %w", gateway, err)
		}
	}
	return nil
}

// stations are the addresses of an end.
func (u *uplink) stations(host bool) (list []station) {
	for _, family := range []bool{false, true} {
		bits := 31
		if family {
			bits = 127
		}
		own, other := u.ends(family)
		if !host {
			own, other = other, own
		}
		list = append(list, station{netip.PrefixFrom(own, bits), other})
	}
	return list
}

// connect brings the host's end up, and returns its number. There is a link when the other end is, too: that one passes packets then, this
// one when connected says so.
func (u *uplink) connect() (index int, err error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return 0, fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	link, err := nl.LinkByName(u.hostName())
	if err != nil {
		return 0, fmt.Errorf("find interface (%s): %w", u.hostName(), err)
	}
	return link.Attrs().Index, addStations(nl, link, uplinkMAC(), hasIPv6(), u.stations(true))
}

// hostTable is the name of the rules of the host; others are of another build.
const hostTable = "forkvm-tap-1"

// prepareHost sets the host's rules, unless they are there.
func prepareHost() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open netfilter: %w", err)
	}
	if _, err := c.ListTableOfFamily(hostTable, nftables.TableFamilyINet); err == nil {
		return nil
	}
	return setTable(hostTable, hostChains())
}
