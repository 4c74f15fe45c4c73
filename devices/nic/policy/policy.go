// Package policy says what a guest may reach: it reads policies, refuses those that make no sense, and decides about addresses
// and names. It opens no connection and knows no packets.
//
// A policy has a mode. With no-network nothing is allowed. With allowlist what an entry names is; with public everything is,
// except for the ranges of addresses that are special: private networks, link-local addresses with the metadata services of
// clouds among them, the host itself. Such a range is reached only through an entry that names it or a part of it: 0.0.0.0/0
// does not.
//
// An entry is TARGET[:PORTS][/PROTOCOL]:
//
//	example.org            a name: TCP, all ports
//	*.example.org:443      every name below it, one port
//	10.1.0.0/16            addresses: TCP, UDP and ICMP echo
//	192.0.2.7:5000-5009/udp
//	[2001:db8::/32]:443
//
// A name counts for the addresses that the guest's resolver has answered for it.
package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// Mode is what a policy allows where its entries say nothing.
type Mode string

// The modes.
const (
	NoNetwork Mode = "no-network"
	Allowlist Mode = "allowlist"
	Public    Mode = "public"
)

// Policy is what users write. Its zero value is the same as no-network.
type Policy struct {
	Mode Mode `json:"mode"`
	// Allow has entries, Deny addresses and prefixes that are refused whatever Allow says.
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	// Limits bound how much of it.
	Limits Limits `json:"limits,omitzero"`
}

// Equal says whether two policies are written the same.
func (p Policy) Equal(o Policy) bool {
	return p.Mode == o.Mode && slices.Equal(p.Allow, o.Allow) && slices.Equal(p.Deny, o.Deny) && p.Limits == o.Limits
}

// maxEntries bounds each list.
const maxEntries = 1024

// EntryError is an entry that cannot be.
type EntryError struct {
	List   string // "allow" or "deny"
	Entry  string
	Reason string
}

func (e *EntryError) Error() string {
	return fmt.Sprintf("read network policy: %s %.200q: %s", e.List, e.Entry, e.Reason)
}

// Rules are a policy that has been read.
type Rules struct {
	mode    Mode
	allow   []rule
	deny    []netip.Prefix
	special []netip.Prefix
	limits  Limits
}

// Compile reads a policy. Errors are *EntryError where an entry is to blame.
func (p Policy) Compile() (*Rules, error) {
	r := &Rules{mode: p.Mode, special: specials()}
	switch p.Mode {
	case "":
		r.mode = NoNetwork
	case NoNetwork, Allowlist, Public:
	default:
		return nil, fmt.Errorf("read network policy: mode %.40q is not one of %s, %s and %s", p.Mode, NoNetwork, Allowlist, Public)
	}
	var err error
	if r.limits, err = p.Limits.compile(); err != nil {
		return nil, err
	}
	if len(p.Allow) > maxEntries || len(p.Deny) > maxEntries {
		return nil, fmt.Errorf("read network policy: %d entries, at most %d each are possible", max(len(p.Allow), len(p.Deny)), maxEntries)
	}
	for i, text := range p.Deny {
		prefix, err := parsePrefix(text)
		if err == nil && slices.Index(p.Deny, text) != i {
			err = errTwice
		}
		if err != nil {
			return nil, &EntryError{"deny", text, err.Error()}
		}
		r.deny = append(r.deny, prefix)
	}
	for i, text := range p.Allow {
		entry, err := parseRule(text)
		if err == nil && slices.Index(p.Allow, text) != i {
			err = errTwice
		}
		if err == nil {
			err = r.contradiction(entry)
		}
		if err != nil {
			return nil, &EntryError{"allow", text, err.Error()}
		}
		r.allow = append(r.allow, entry)
	}
	if r.mode == Allowlist && len(r.allow) == 0 {
		return nil, fmt.Errorf("read network policy: mode %s without an entry: say %s to allow nothing", Allowlist, NoNetwork)
	}
	return r, nil
}

// contradiction says why an entry cannot be in this policy.
func (r *Rules) contradiction(entry rule) error {
	if r.mode == NoNetwork {
		return fmt.Errorf("mode %s allows nothing", NoNetwork)
	}
	if entry.name != "" {
		if r.mode == Public {
			return fmt.Errorf("mode %s allows all names", Public)
		}
		return nil
	}
	for _, denied := range r.deny {
		if within(entry.prefix, denied) {
			return fmt.Errorf("is denied by %s", denied)
		}
	}
	return nil
}

// Mode is the policy's mode.
func (r *Rules) Mode() Mode { return r.mode }
