package agent

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// addressesPath lists the addresses of IPv6.
const addressesPath = "/proc/net/if_inet6"

// linkLocal is the address for the link only that Linux makes of a card's address (RFC 4291, appendix A; RFC 2464, section 5).
func linkLocal(card net.HardwareAddr) netip.Prefix {
	a := [16]byte{0: 0xfe, 1: 0x80, 8: card[0] ^ 2, 9: card[1], 10: card[2], 11: 0xff, 12: 0xfe, 13: card[3], 14: card[4], 15: card[5]}
	return netip.PrefixFrom(netip.AddrFrom16(a), 64)
}

// hasAddress says whether an interface is on a list of the kernel's with an address: lines of address, index, length of the
// prefix, scope, flags and the interface's name.
func hasAddress(list []byte, name string, a netip.Addr) bool {
	for line := range bytes.Lines(list) {
		fields := bytes.Fields(line)
		if len(fields) == 6 && string(fields[5]) == name && string(fields[0]) == hex.EncodeToString(a.AsSlice()) {
			return true
		}
	}
	return false
}

// hardwareAddress is the address that the card has now.
func (c card) hardwareAddress() (net.HardwareAddr, error) {
	text, err := os.ReadFile(filepath.Join(interfacesPath, c.name, "address"))
	if err != nil {
		return nil, err
	}
	a, err := net.ParseMAC(strings.TrimSpace(string(text)))
	if err == nil && len(a) != 6 {
		err = fmt.Errorf("%s has the address %v", c.name, a)
	}
	return a, err
}

// renewLinkLocal replaces the address that the kernel has made of the card's former one when the link came up: it makes none of
// the next, and a clone would have its parent's. What others have set stays.
func (r *route) renewLinkLocal(c card, was, is net.HardwareAddr) error {
	list, err := os.ReadFile(addressesPath)
	if err != nil {
		return err
	}
	former, next := linkLocal(was), linkLocal(is)
	if former == next || !hasAddress(list, c.name, former.Addr()) {
		return nil
	}
	if err := r.addAddress(c, next); err != nil {
		return err
	}
	err = r.do(unix.RTM_DELADDR, 0, addressBody(c, former))
	if errors.Is(err, unix.EADDRNOTAVAIL) { // somebody was faster
		return nil
	}
	return err
}
