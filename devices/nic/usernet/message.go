package usernet

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"time"
)

// Codes of the domain name system (RFC 1035, section 4.1.1; RFC 6895).
const (
	codeFormat         = 1
	codeServerFailure  = 2
	codeNotImplemented = 4
	codeRefused        = 5

	typeA     = 1
	typeAAAA  = 28
	typeOPT   = 41
	typeSVCB  = 64
	typeHTTPS = 65
	typeIXFR  = 251
	typeAXFR  = 252

	classInternet = 1

	dnsHeader   = 12
	plainDNS    = 512 // bytes of an answer by UDP to a query without EDNS
	flagAnswer  = 0x8000
	flagCut     = 0x0200
	flagDesired = 0x0100 // recursion
	opcodeMask  = 0x7800
)

// query is what the guest asks.
type query struct {
	id    uint16
	flags uint16
	name  string // lower case, without the last dot
	kind  uint16
	class uint16
	end   int // of the question
	room  int // for an answer by UDP
}

// readQuery reads a query with one question. ok is false for what is none at all.
func readQuery(m []byte) (q query, ok bool) {
	if len(m) < dnsHeader {
		return q, false
	}
	q.id, q.flags = binary.BigEndian.Uint16(m), binary.BigEndian.Uint16(m[2:])
	if q.flags&flagAnswer != 0 || binary.BigEndian.Uint16(m[4:]) != 1 {
		return q, false
	}
	name, at, ok := readName(m, dnsHeader)
	if !ok || at+4 > len(m) {
		return q, false
	}
	q.name, q.kind, q.class, q.end = strings.ToLower(name), binary.BigEndian.Uint16(m[at:]), binary.BigEndian.Uint16(m[at+2:]), at+4
	q.room = plainDNS
	records(m, q.end, 0, func(r record) {
		if r.kind == typeOPT {
			q.room = max(q.room, int(r.class))
		}
	})
	return q, true
}

// readName reads a name from at on, and returns it with dots between its labels and where it ends in the message. Pointers lead
// backwards only (RFC 1035, section 4.1.4). A label with a dot or a zero in it is no part of a host name.
func readName(m []byte, at int) (name string, end int, ok bool) {
	var b strings.Builder
	limit := len(m)
	end = -1
	for at < limit {
		n := int(m[at])
		switch {
		case n == 0:
			if end < 0 {
				end = at + 1
			}
			return b.String(), end, true
		case n&0xc0 == 0xc0:
			if at+2 > len(m) {
				return "", 0, false
			}
			if end < 0 {
				end = at + 2
			}
			to := int(binary.BigEndian.Uint16(m[at:]) & 0x3fff)
			if to >= at {
				return "", 0, false
			}
			limit, at = at, to
			continue
		case n > 63 || at+1+n > len(m) || b.Len()+n > 255:
			return "", 0, false
		}
		label := string(m[at+1 : at+1+n])
		if strings.ContainsAny(label, ".\x00") {
			return "", 0, false
		}
		if b.Len() > 0 {
			b.WriteByte('.')
		}
		b.WriteString(label)
		at += 1 + n
	}
	return "", 0, false
}

// record is a resource record.
type record struct {
	kind, class uint16
	ttl         time.Duration
	data        []byte
}

// records calls each for the records behind the question, of the answers only if answers is above 0 and says how many.
func records(m []byte, at, answers int, each func(record)) {
	count := answers
	if count == 0 {
		for i := 6; i < dnsHeader; i += 2 {
			count += int(binary.BigEndian.Uint16(m[i:]))
		}
	}
	for range count {
		_, end, ok := readName(m, at)
		if !ok || end+10 > len(m) {
			return
		}
		p := m[end:]
		n := int(binary.BigEndian.Uint16(p[8:]))
		if end+10+n > len(m) {
			return
		}
		each(record{
			kind: binary.BigEndian.Uint16(p), class: binary.BigEndian.Uint16(p[2:]),
			ttl: time.Duration(binary.BigEndian.Uint32(p[4:])) * time.Second, data: p[10 : 10+n],
		})
		at = end + 10 + n
	}
}

// addresses calls each for the addresses that an answer has. Aliases are followed by whoever resolved them.
func addresses(m []byte, q query, each func(netip.Addr, time.Duration)) {
	count := int(binary.BigEndian.Uint16(m[6:]))
	if count == 0 {
		return
	}
	records(m, q.end, count, func(r record) {
		if r.class != classInternet || r.kind != typeA && r.kind != typeAAAA {
			return
		}
		if a, ok := netip.AddrFromSlice(r.data); ok && a.Is4() == (r.kind == typeA) {
			each(a, r.ttl)
		}
	})
}

// answers says whether m answers the query, which went out as sent.
func (q query) answered(m []byte, sent []byte) bool {
	return len(m) >= q.end && m[0] == sent[0] && m[1] == sent[1] && m[2]&0x80 != 0 &&
		strings.EqualFold(string(m[dnsHeader:q.end]), string(sent[dnsHeader:q.end]))
}

// reply makes an answer without records: to a query q in m, or to something that is hardly one.
func (q query) reply(m []byte, code uint16, cut bool) []byte {
	end := max(q.end, dnsHeader)
	r := append([]byte(nil), m[:end]...)
	flags := flagAnswer | q.flags&(opcodeMask|flagDesired) | 0x0080 | code
	if cut {
		flags |= flagCut
	}
	binary.BigEndian.PutUint16(r[2:], flags)
	clear(r[4:dnsHeader])
	if q.end > 0 {
		r[5] = 1
	}
	return r
}
