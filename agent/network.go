package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

const (
	interfacesPath = "/sys/class/net"
	resolvPath     = "/etc/resolv.conf"
	// virtioNetwork is the virtio device type of a network card, as sysfs has it.
	virtioNetwork = "0x0001"
)

// SetNetwork gives the card its address, the interface its addresses and routes, and programs their resolvers. What is set
// already is set again.
func (m machine) SetNetwork(n proto.Network) error {
	card, err := findCard(interfacesPath)
	if err != nil {
		return err
	}
	route, err := openRoute()
	if err != nil {
		return err
	}
	defer route.close()
	mac, err := net.ParseMAC(n.MAC)
	if err != nil {
		return err
	}
	was, err := card.hardwareAddress()
	if err != nil {
		return fmt.Errorf("read address of %s: %w", card.name, err)
	}
	if err := route.setLink(card, mac); err != nil {
		return fmt.Errorf("set address of %s: %w", card.name, err)
	}
	v6 := speaksIPv6(card.name)
	if v6 {
		if err := route.renewLinkLocal(card, was, mac); err != nil {
			return fmt.Errorf("set address of %s for its link: %w", card.name, err)
		}
	}
	for _, text := range n.Addresses {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is6() && !v6 {
			continue // checked before; a guest without IPv6 has none of its addresses
		}
		if err := route.addAddress(card, p); err != nil {
			return fmt.Errorf("add address %v to %s: %w", p, card.name, err)
		}
	}
	for _, text := range n.Gateways {
		a, err := netip.ParseAddr(text)
		if err != nil || a.Is6() && !v6 {
			continue
		}
		if err := route.setDefault(card, a); err != nil {
			return fmt.Errorf("set route to %v: %w", a, err)
		}
	}
	return m.setResolvers(resolvPath, n.Resolvers)
}

// card is a network interface.
type card struct {
	name  string
	index uint32
}

// findCard returns the interface of the virtio network card, the first by name.
func findCard(dir string) (card, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return card{}, err
	}
	for _, e := range entries {
		kind, err := os.ReadFile(filepath.Join(dir, e.Name(), "device/device"))
		if err != nil || strings.TrimSpace(string(kind)) != virtioNetwork {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name(), "ifindex"))
		if err != nil {
			return card{}, err
		}
		index, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
		if err != nil {
			return card{}, fmt.Errorf("read number of %s: %w", e.Name(), err)
		}
		return card{e.Name(), uint32(index)}, nil
	}
	return card{}, errors.New("this guest has no network card that its kernel knows (is virtio_net loaded?)")
}

// speaksIPv6 says whether the interface can have addresses of IPv6.
func speaksIPv6(name string) bool {
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6")
	return err == nil && strings.TrimSpace(string(b)) == "0"
}

// setResolvers replaces the file of resolvers. A link to a file that is not there, or that a local resolver's service writes,
// becomes a file; on a read-only root one in the state directory is mounted over it.
func (m machine) setResolvers(path string, resolvers []string) error {
	var b strings.Builder
	for _, r := range resolvers {
		fmt.Fprintf(&b, "nameserver %s\n", r)
	}
	content := []byte(b.String())
	if now, err := os.ReadFile(path); err == nil && string(now) == b.String() {
		return nil
	}
	target, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && strings.HasPrefix(target, "/run/") {
		target, err = path, nil
	}
	if err == nil {
		err = replaceFile(target, content, 0o644)
	}
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EBUSY) {
		err = m.cover(target, "resolv.conf", content)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// route is a connection to the kernel's routing tables (rtnetlink(7)).
type route struct {
	fd       int
	sequence uint32
}

func openRoute() (*route, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open routing socket: %w", err)
	}
	return &route{fd: fd}, nil
}

func (r *route) close() { unix.Close(r.fd) }

// setLink brings the interface up, with this address of the card.
func (r *route) setLink(c card, address net.HardwareAddr) error {
	body := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(body[4:], c.index)
	binary.NativeEndian.PutUint32(body[8:], unix.IFF_UP)
	binary.NativeEndian.PutUint32(body[12:], unix.IFF_UP) // what changes
	return r.do(unix.RTM_NEWLINK, 0, attribute(body, unix.IFLA_ADDRESS, address))
}

// addAddress gives the interface an address, at once: nobody else is on the link to ask for it.
func (r *route) addAddress(c card, p netip.Prefix) error {
	return r.do(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, addressBody(c, p))
}

// addressBody is a request's about an address of an interface.
func addressBody(c card, p netip.Prefix) []byte {
	family := byte(unix.AF_INET)
	flags := byte(unix.IFA_F_PERMANENT)
	if p.Addr().Is6() {
		family, flags = unix.AF_INET6, flags|unix.IFA_F_NODAD
	}
	body := []byte{family, byte(p.Bits()), flags, unix.RT_SCOPE_UNIVERSE, 0, 0, 0, 0}
	binary.NativeEndian.PutUint32(body[4:], c.index)
	body = attribute(body, unix.IFA_LOCAL, p.Addr().AsSlice())
	return attribute(body, unix.IFA_ADDRESS, p.Addr().AsSlice())
}

// setDefault makes the gateway the way to everywhere.
func (r *route) setDefault(c card, gateway netip.Addr) error {
	family := byte(unix.AF_INET)
	if gateway.Is6() {
		family = unix.AF_INET6
	}
	body := make([]byte, unix.SizeofRtMsg)
	body[0], body[4], body[5], body[6], body[7] = family, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST
	body = attribute(body, unix.RTA_GATEWAY, gateway.AsSlice())
	body = attribute(body, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, c.index))
	return r.do(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, body)
}

// attribute appends an attribute; a message's parts begin at multiples of four.
func attribute(b []byte, kind uint16, data []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, data...)
	return append(b, make([]byte, -len(b)&3)...)
}

// do makes a request and waits for the kernel's answer, which is an error number or 0.
func (r *route) do(kind, flags uint16, body []byte) error {
	r.sequence++
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	m = binary.NativeEndian.AppendUint32(m, r.sequence)
	m = binary.NativeEndian.AppendUint32(m, 0)
	if err := unix.Sendto(r.fd, append(m, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(r.fd, answer, 0)
	if err != nil {
		return err
	}
	if n < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return errors.New("unexpected answer of the kernel")
	}
	if code := int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}
