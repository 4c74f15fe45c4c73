package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Protocol is what a guest speaks; values are bits.
type Protocol uint8

// The protocols.
const (
	TCP Protocol = 1 << iota
	UDP
	ICMP // echo
)

func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case ICMP:
		return "icmp"
	}
	return fmt.Sprintf("protocols %#x", uint8(p))
}

// rule is an entry that has been read: of a name or of a prefix.
type rule struct {
	name      string // lower case; what is below it if wildcard
	wildcard  bool
	prefix    netip.Prefix
	protocols Protocol
	first     uint16 // ports
	last      uint16
	ports     bool // are named
}

var errTwice = errors.New("is there twice")

// parseRule reads TARGET[:PORTS][/PROTOCOL].
func parseRule(text string) (r rule, err error) {
	target, ports, protocol, err := split(text)
	if err != nil {
		return r, err
	}
	r.last = 65535
	if ports != "" {
		r.ports = true
		if r.first, r.last, err = parsePorts(ports); err != nil {
			return r, err
		}
	}
	if strings.HasPrefix(target, "[") || looksLikeAddress(target) {
		r.protocols = TCP | UDP | ICMP
		if r.prefix, err = parsePrefix(strings.TrimSuffix(strings.TrimPrefix(target, "["), "]")); err != nil {
			return r, err
		}
	} else {
		r.protocols = TCP
		r.name, r.wildcard = strings.CutPrefix(strings.ToLower(target), "*.")
		if err := checkName(r.name); err != nil {
			return r, err
		}
	}
	if protocol != 0 {
		r.protocols = protocol
	}
	if r.ports {
		if r.protocols == ICMP {
			return r, errors.New("ICMP has no ports")
		}
		r.protocols &^= ICMP
	}
	return r, nil
}

// split cuts an entry into its parts. A slash is of a protocol or of a prefix.
func split(text string) (target, ports string, protocol Protocol, err error) {
	target = text
	for name, p := range map[string]Protocol{"/tcp": TCP, "/udp": UDP, "/icmp": ICMP} {
		if rest, ok := strings.CutSuffix(text, name); ok {
			target, protocol = rest, p
		}
	}
	if strings.HasPrefix(target, "[") {
		end := strings.IndexByte(target, ']')
		if end < 0 {
			return "", "", 0, errors.New("has a [ without its ]")
		}
		rest := target[end+1:]
		if rest == "" {
			return target, "", protocol, nil
		}
		if rest[0] != ':' || len(rest) == 1 {
			return "", "", 0, fmt.Errorf("%.40q behind the address is no port", rest)
		}
		return target[:end+1], rest[1:], protocol, nil
	}
	// More than one colon is an IPv6 address without brackets, which has no ports.
	if strings.Count(target, ":") == 1 {
		target, ports, _ = strings.Cut(target, ":")
		if ports == "" {
			return "", "", 0, errors.New("has a colon and no port")
		}
	}
	return target, ports, protocol, nil
}

func parsePorts(text string) (first, last uint16, err error) {
	from, to, isRange := strings.Cut(text, "-")
	if first, err = parsePort(from); err != nil {
		return 0, 0, err
	}
	last = first
	if isRange {
		if last, err = parsePort(to); err != nil {
			return 0, 0, err
		}
	}
	if last < first {
		return 0, 0, fmt.Errorf("ports %d-%d go backwards", first, last)
	}
	return first, last, nil
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || text[0] == '+' {
		return 0, fmt.Errorf("port %.20q is not one of 1 to 65535", text)
	}
	return uint16(n), nil
}

// looksLikeAddress tells addresses from names: no top-level name ends in a digit, and no name has a colon.
func looksLikeAddress(target string) bool {
	if strings.ContainsAny(target, ":/") {
		return true
	}
	last := target[strings.LastIndexByte(target, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") == ""
}

// parsePrefix reads an address or a prefix without bits behind its length. Addresses of IPv4 written as IPv6 are what they mean.
func parsePrefix(text string) (netip.Prefix, error) {
	if strings.Contains(text, "/") {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return p, errors.New("is no prefix of addresses")
		}
		if p.Addr().Is4In6() {
			if p.Bits() < 96 {
				return p, errors.New("is wider than the addresses of IPv4 in it")
			}
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		if p != p.Masked() {
			return p, fmt.Errorf("has bits behind its length: is %s meant?", p.Masked())
		}
		return p, nil
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Prefix{}, errors.New("is neither a name nor an address")
	}
	a = a.Unmap()
	return netip.PrefixFrom(a, a.BitLen()), nil
}

// checkName accepts host names as the domain name system has them, with the underscore that some use.
func checkName(name string) error {
	if name == "" || len(name) > 253 {
		return fmt.Errorf("a name of %d bytes is none", len(name))
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "*" || label == "" && name == "*" {
			return errors.New("a * stands only in front, followed by a dot and a name")
		}
		if label == "" || len(label) > 63 || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" ||
			label[0] == '-' || label[len(label)-1] == '-' {
			return fmt.Errorf("%.70q is no part of a host name (write names of other alphabets as xn--…)", label)
		}
	}
	return nil
}

// matches says whether the rule is about a protocol and a port.
func (r *rule) matches(p Protocol, port uint16) bool {
	return r.protocols&p != 0 && (p == ICMP || port >= r.first && port <= r.last)
}

// names says whether the rule is about a name, which is in lower case and has no dot at its end.
func (r *rule) names(name string) bool {
	if r.name == "" {
		return false
	}
	if r.wildcard {
		rest, ok := strings.CutSuffix(name, "."+r.name)
		return ok && rest != ""
	}
	return name == r.name
}
