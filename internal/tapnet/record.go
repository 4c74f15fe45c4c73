package tapnet

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Record is what others than its maker have to know of a network. It is gone when the network is.
type Record struct {
	// Settings and Policies are the numbers of maps in the kernel, and Uplink is that of the host's end of the way out.
	Settings uint32 `json:"settings"`
	Policies uint32 `json:"policies"`
	Uplink   int    `json:"uplink"`
	// Resolver is who answers at the address of the guest's resolver, if anybody.
	Resolver netip.AddrPort `json:"resolver,omitzero"`
	// IPv6 says that there is some on the link, Leads6 that it leads out of the host.
	IPv6   bool `json:"ipv6,omitempty"`
	Leads6 bool `json:"leads6,omitempty"`
	// Source tells builds of the programs apart.
	Source string `json:"source"`
}

// newRecord is that of a network of now, on this host, which is to be made.
func newRecord(resolver netip.AddrPort) Record {
	r := Record{Leads6: IPv6() == nil, Source: sourceHash}
	if resolver.IsValid() && resolver.Addr().Is4() && !resolver.Addr().IsLoopback() {
		r.Resolver = resolver
	}
	return r
}

// Names says that there is somebody to ask for names.
func (r *Record) Names() bool { return r.Resolver.IsValid() }

// ErrStale: a network that was made ahead is not what would be made now.
var ErrStale = errors.New("network is of another time")

// Claim is Open for a network of this name that was made ahead and that nobody uses: it is ErrGone or ErrStale unless all of it is
// there and is what Create would make now.
func Claim(c Config, r Record) (*Control, error) {
	control, err := claim(c, r)
	if err != nil {
		return nil, fmt.Errorf("claim network (%s): %w", c.Name, explain(err))
	}
	return control, nil
}

func claim(c Config, r Record) (*Control, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	now := newRecord(c.Resolver)
	if r.Resolver != now.Resolver || r.Leads6 != now.Leads6 || r.Source != now.Source {
		return nil, ErrStale
	}
	if err := prepareHost(); err != nil {
		return nil, err
	}
	if err := connected(r.Uplink, time.Time{}); err != nil {
		return nil, err
	}
	// The programs' maps are gone when the TAP is.
	m, err := openMaps(c.Name, r)
	if err != nil {
		return nil, err
	}
	return &Control{c.Name, m}, nil
}

// connected returns when the host's end of a way out passes packets. It is ErrGone if there is none, or it does not until the deadline.
func connected(index int, deadline time.Time) error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	for ; ; time.Sleep(time.Millisecond) {
		link, err := nl.LinkByIndex(index)
		var missing netlink.LinkNotFoundError
		switch {
		case errors.As(err, &missing):
			return ErrGone
		case err != nil:
			return fmt.Errorf("find interface (%d): %w", index, err)
		}
		is := link.Attrs()
		switch {
		case !strings.HasPrefix(is.Name, hostPrefix):
			return ErrGone
		case is.OperState == netlink.OperUp:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("interface %s is down: %w", is.Name, ErrGone)
		}
	}
}
