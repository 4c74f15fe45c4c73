package tapnet

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// number is a namespace's, which no other has as long as it is there.
func number(space *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(space.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat network namespace: %w", err)
	}
	return st.Ino, nil
}

// set writes kernel parameters of the calling thread's namespace.
func set(parameters ...[2]string) error {
	for _, p := range parameters {
		if err := os.WriteFile("/proc/sys/net/"+p[0], []byte(p[1]), 0); err != nil {
			return fmt.Errorf("set parameter net/%s: %w", p[0], err)
		}
	}
	return nil
}

// answering returns when the calling thread's namespace answers neighbours on an interface who ask for addresses of IPv6. The kernel joins
// the groups that they ask some time after it has the addresses.
func answering(name string, addresses ...netip.Addr) error {
	deadline := time.Now().Add(linkUp)
	for _, a := range addresses {
		for {
			list, err := os.ReadFile("/proc/thread-self/net/igmp6")
			if err != nil {
				return fmt.Errorf("list groups of %s: %w", name, err)
			}
			if isMember(string(list), name, askedAt(a)) {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("bring %s up: nobody answers for %v", name, a)
			}
			time.Sleep(100 * time.Microsecond)
		}
	}
	return nil
}

// askedAt is the group that neighbours of an address of IPv6 ask for it (RFC 4291, section 2.7.1).
func askedAt(a netip.Addr) [16]byte {
	group, own := netip.MustParseAddr("ff02::1:ff00:0").As16(), a.As16()
	copy(group[13:], own[13:])
	return group
}

// isMember looks for an interface's membership in a list of the kernel's: number and name of an interface, group, and more.
func isMember(list, name string, group [16]byte) bool {
	for line := range strings.Lines(list) {
		if f := strings.Fields(line); len(f) > 2 && f[1] == name && f[2] == hex.EncodeToString(group[:]) {
			return true
		}
	}
	return false
}

// hasIPv6 says whether the calling thread's namespace has IPv6 at all.
func hasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return !errors.Is(err, os.ErrNotExist)
}
