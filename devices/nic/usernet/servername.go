package usernet

import (
	"bytes"
	"encoding/binary"
	"net"
	"strings"
)

// saying is what the first bytes of a client say of the server that it wants.
type saying uint8

const (
	undecided     saying = iota // more bytes are needed
	namesServer                 // this one
	namesNobody                 // a protocol in which servers are named, without a name
	otherProtocol               // a protocol that knows no names of servers
)

// serverName reads the beginning of what a client sends: the server name of TLS (RFC 6066, section 3), or the Host of a request
// of HTTP/1.
func serverName(b []byte) (string, saying) {
	switch {
	case len(b) == 0:
		return "", undecided
	case b[0] == 22: // handshake
		return tlsName(b)
	case b[0] >= 'A' && b[0] <= 'Z':
		return httpName(b)
	}
	return "", otherProtocol
}

// tlsName reads the records of a ClientHello (RFC 8446, sections 4.1.2 and 5.1).
func tlsName(b []byte) (string, saying) {
	var hello []byte
	for {
		if len(b) < 5 {
			return "", undecided
		}
		n := int(binary.BigEndian.Uint16(b[3:]))
		if b[0] != 22 || b[1] != 3 || n == 0 || n > 1<<14 {
			return "", namesNobody
		}
		complete := len(b) >= 5+n
		if !complete {
			return "", undecided
		}
		hello, b = append(hello, b[5:5+n]...), b[5+n:]
		if len(hello) >= 4 {
			length := int(hello[1])<<16 | int(hello[2])<<8 | int(hello[3])
			if hello[0] != 1 || length > maxOpening {
				return "", namesNobody
			}
			if len(hello) >= 4+length {
				return helloName(hello[4 : 4+length])
			}
		}
	}
}

// helloName reads a ClientHello.
func helloName(p []byte) (string, saying) {
	r := reader{p}
	r.skip(2 + 32) // version and random
	r.vector8()    // session id
	r.vector16()   // cipher suites
	r.vector8()    // compression methods
	extensions := reader{r.vector16()}
	for len(extensions.rest) > 0 {
		kind := extensions.number(2)
		data := reader{extensions.vector16()}
		if kind != 0 {
			continue
		}
		list := reader{data.vector16()}
		for len(list.rest) > 0 {
			nameType := list.number(1)
			if name := list.vector16(); nameType == 0 && len(name) > 0 {
				return string(name), namesServer
			}
		}
	}
	return "", namesNobody
}

// reader takes apart what may end at any byte; it is empty from then on.
type reader struct{ rest []byte }

func (r *reader) skip(n int) []byte {
	if n > len(r.rest) {
		r.rest = nil
		return nil
	}
	p := r.rest[:n]
	r.rest = r.rest[n:]
	return p
}

func (r *reader) number(n int) (v int) {
	for _, b := range r.skip(n) {
		v = v<<8 | int(b)
	}
	return v
}

func (r *reader) vector8() []byte  { return r.skip(r.number(1)) }
func (r *reader) vector16() []byte { return r.skip(r.number(2)) }

// httpName reads the Host of a request (RFC 9112, section 3.2). What begins like a request and is none is another protocol.
func httpName(b []byte) (string, saying) {
	head, _, whole := bytes.Cut(b, []byte("\r\n\r\n"))
	first, rest, line := bytes.Cut(head, []byte("\r\n"))
	if !line && !whole {
		if plausibleRequest(first) {
			return "", undecided
		}
		return "", otherProtocol
	}
	fields := strings.Fields(string(first))
	if len(fields) != 3 || !strings.HasPrefix(fields[2], "HTTP/1.") {
		return "", otherProtocol
	}
	if !whole {
		return "", undecided
	}
	host, hosts := "", 0
	for field := range bytes.SplitSeq(rest, []byte("\r\n")) {
		if name, value, ok := strings.Cut(string(field), ":"); ok && strings.EqualFold(name, "host") {
			host, hosts = strings.TrimSpace(value), hosts+1
		}
	}
	// An absolute target goes before the Host (section 3.2.2), so that it has to be the same.
	if _, after, ok := strings.Cut(fields[1], "://"); ok && fields[1][0] != '/' {
		authority, _, _ := strings.Cut(after, "/")
		if !strings.EqualFold(authority, host) {
			return authority, namesNobody
		}
	}
	if hosts != 1 || host == "" || fields[0] == "CONNECT" {
		return host, namesNobody
	}
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return host, namesServer
}

// plausibleRequest says whether an incomplete line may become one of a request: a method in capitals, a space, a target.
func plausibleRequest(line []byte) bool {
	method, _, _ := bytes.Cut(line, []byte(" "))
	return len(line) < 8192 && len(method) <= 20 && len(bytes.Trim(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ-")) == 0
}
