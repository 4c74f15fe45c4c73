package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Port is a port of the host behind which is one of the guest's: who reaches the one reaches the other.
type Port struct {
	Host     netip.AddrPort
	Guest    uint16
	Protocol Protocol // TCP or UDP
}

// ParsePort reads [ADDRESS:]PORT:GUEST[/tcp|/udp]; without an address it is a port of 127.0.0.1.
func ParsePort(text string) (p Port, err error) {
	fail := func(err error) (Port, error) { return p, fmt.Errorf("read published port %.80q: %w", text, err) }
	p.Protocol = TCP
	rest, udp := strings.CutSuffix(text, "/udp")
	if udp {
		p.Protocol = UDP
	} else {
		rest = strings.TrimSuffix(rest, "/tcp")
	}
	at := strings.LastIndexByte(rest, ':')
	if at < 0 {
		return fail(errors.New("is not [ADDRESS:]PORT:GUEST"))
	}
	host := rest[:at]
	if p.Guest, err = parsePort(rest[at+1:]); err != nil {
		return fail(err)
	}
	if !strings.Contains(host, ":") {
		host = "127.0.0.1:" + host
	}
	if p.Host, err = netip.ParseAddrPort(host); err != nil || p.Host.Port() == 0 || p.Host.Addr().Zone() != "" {
		return fail(errors.New("ADDRESS:PORT is none"))
	}
	return p, nil
}

func (p Port) String() string { return fmt.Sprintf("%v:%d/%v", p.Host, p.Guest, p.Protocol) }

// MarshalText and UnmarshalText are String and ParsePort.
func (p Port) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

func (p *Port) UnmarshalText(text []byte) (err error) {
	*p, err = ParsePort(string(text))
	return err
}

// maxPorts is how many ports a guest may have published.
const maxPorts = 64

// CheckPorts says what is wrong with publishing all of these.
func CheckPorts(ports []Port) error {
	if len(ports) > maxPorts {
		return fmt.Errorf("publish ports: %d, at most %d are possible", len(ports), maxPorts)
	}
	for i, p := range ports {
		if slices.ContainsFunc(ports[:i], func(o Port) bool { return o.Host == p.Host && o.Protocol == p.Protocol }) {
			return fmt.Errorf("publish port %v: %v is there twice", p, p.Host)
		}
	}
	return nil
}
