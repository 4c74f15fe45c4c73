package tapnet

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// UnavailableError says that this host, or this user, has no TAP devices for VMs, and what would have to be otherwise.
type UnavailableError struct {
	Cause error
	Fix   string
}

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("a network card cannot have a TAP device here: %v: %s", e.Cause, e.Fix)
}

func (e *UnavailableError) Unwrap() error { return e.Cause }

func unavailable(cause error, fix string) error { return &UnavailableError{Cause: cause, Fix: fix} }

// ErrGone: the network has ended, with the process that had its TAP.
var ErrGone = errors.New("network is gone")

const (
	tunPath    = "/dev/net/tun"
	forwarding = "/proc/sys/net/ipv4/ip_forward"
)

var (
	errPrivilege  = errors.New("this process is not root's, or lacks CAP_NET_ADMIN or CAP_SYS_ADMIN")
	errForwarding = errors.New("this host does not pass packets on")
)

// Available says what is missing that can be known without trying: an *UnavailableError.
func Available() error {
	if err := privileged(); err != nil {
		return err
	}
	if err := unix.Access(tunPath, unix.R_OK|unix.W_OK); err != nil {
		return unavailable(fmt.Errorf("%s: %w", tunPath, err), "modprobe tun")
	}
	if on, err := os.ReadFile(forwarding); err != nil || strings.TrimSpace(string(on)) != "1" {
		return unavailable(errForwarding, "sysctl -w net.ipv4.ip_forward=1")
	}
	return nil
}

func privileged() error {
	own, err := linux.OwnCapabilities()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 || !own.Has(unix.CAP_NET_ADMIN) || !own.Has(unix.CAP_SYS_ADMIN) {
		return unavailable(errPrivilege, "run as root")
	}
	return nil
}

// IPv6 says why guests behind a TAP reach nothing by IPv6, nil if they do as far as this host goes.
func IPv6() error {
	on, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/forwarding")
	switch {
	case err != nil:
		return errors.New("this host has no IPv6")
	case strings.TrimSpace(string(on)) != "1":
		return errors.New("this host does not pass packets of IPv6 on: sysctl -w net.ipv6.conf.all.forwarding=1")
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Dst: nil}, netlink.RT_FILTER_DST)
	if err != nil || len(routes) == 0 {
		return errors.New("this host has no default route of IPv6")
	}
	return nil
}

// explain tells errors of a kernel that cannot from others.
func explain(err error) error {
	var known *UnavailableError
	switch {
	case errors.As(err, &known):
		return err
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOENT):
		return unavailable(err, "Linux 5.14 or later is needed, with CONFIG_BPF_SYSCALL, CONFIG_VETH, CONFIG_NF_CT_NETLINK, CONFIG_NF_TABLES_INET, CONFIG_NFT_CT, "+
			"CONFIG_NFT_CONNLIMIT, CONFIG_NFT_MASQ, CONFIG_NFT_NAT and CONFIG_NFT_REJECT_INET")
	case errors.Is(err, unix.EPERM):
		return unavailable(err, "run outside of a container or sandbox that forbids eBPF and network namespaces")
	}
	return err
}
