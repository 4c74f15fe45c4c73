// Package attempt is what a program in a guest tries on the network, and what comes of it. Tests say what to try, the guest's
// program guestload does it, and whoever is at the other end of the network says what has arrived there.
package attempt

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Attempt is one thing to try.
type Attempt struct {
	Kind Kind
	// To is ADDRESS:PORT; in place of the address there may be a name, which the resolver is asked for.
	To string `json:",omitempty"`
	// Send is the first that a client says.
	Send []byte `json:",omitempty"`
	// Name is what is asked for: of a TLS server or of a resolver.
	Name string `json:",omitempty"`
	Type uint16 `json:",omitempty"` // of DNS records
	// Again asks for the name in To once more, and goes where the second answer says.
	Again bool `json:",omitempty"`
	// Frames are sent as they are.
	Frames []Frame `json:",omitempty"`
}

// Kind is what is tried.
type Kind string

// The kinds.
const (
	TCP    Kind = "tcp"     // connect and, with Send, get an answer
	UDP    Kind = "udp"     // send a datagram and get an answer
	TLS    Kind = "tls"     // shake hands
	DNS    Kind = "dns"     // ask by UDP
	DNSTCP Kind = "dns-tcp" // ask by TCP
	Follow Kind = "follow"  // be redirected by HTTP
	Frames Kind = "frames"  // send frames, and see what comes back
)

// Frame is one frame. Source and Destination are Own, Gateway, or addresses.
type Frame struct {
	Source, Destination string
	Type                uint16
	Payload             []byte
}

// Addresses of frames by what they are.
const (
	Own       = "own"
	Gateway   = "gateway"
	Broadcast = "ff:ff:ff:ff:ff:ff"
)

// Answers.
const (
	OK          = "ok"
	Refused     = "refused"     // at once: a reset, or an ICMP error for the port
	Reset       = "reset"       // after it was accepted, before the server said anything
	Closed      = "closed"      // the same, politely
	Unreachable = "unreachable" // an ICMP error for the host, or nobody there
	Silent      = "silent"      // nothing at all
)

// patience is how long an answer may take. Where guests are tested time is counted, and waiting costs nothing.
const patience = 10 * time.Second

// Do tries something and says what came of it: one of the answers, the code of a resolver, what a frame came back.
func (a *Attempt) Do() string {
	switch a.Kind {
	case TCP, TLS, Follow:
		return a.stream()
	case UDP:
		return a.datagram()
	case DNS, DNSTCP:
		answer, code := ask(a.Kind == DNSTCP, a.To, a.Name, a.Type)
		if code == "" && len(answer) == 0 {
			return "empty"
		}
		if code == "" {
			return OK
		}
		return code
	case Frames:
		return a.frames()
	}
	return "unknown kind " + string(a.Kind)
}

// where resolves To.
func (a *Attempt) where() (at netip.AddrPort, failed string) {
	host, port, err := net.SplitHostPort(a.To)
	if err != nil {
		return at, err.Error()
	}
	number, err := net.LookupPort("tcp", port)
	if err != nil {
		return at, err.Error()
	}
	if address, err := netip.ParseAddr(host); err == nil {
		return netip.AddrPortFrom(address, uint16(number)), ""
	}
	rounds := 1
	if a.Again {
		rounds = 2
	}
	var answer []netip.Addr
	for range rounds {
		if answer, failed = ask(false, resolver(), host, 1); failed != "" {
			return at, failed
		}
	}
	if len(answer) == 0 {
		return at, "empty"
	}
	return netip.AddrPortFrom(answer[0], uint16(number)), ""
}

func (a *Attempt) stream() string {
	at, failed := a.where()
	if failed != "" {
		return failed
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", at.String())
	if err != nil {
		return word(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if a.Kind == TLS {
		err := tls.Client(c, &tls.Config{ServerName: a.Name, InsecureSkipVerify: true}).Handshake()
		return wordAfter(err)
	}
	if len(a.Send) == 0 {
		return OK
	}
	if _, err := c.Write(a.Send); err != nil {
		return wordAfter(err)
	}
	if a.Kind == Follow {
		return follow(c)
	}
	if n, err := c.Read(make([]byte, 512)); n == 0 {
		return wordAfter(err)
	}
	return OK
}

// follow goes where an answer of HTTP says.
func follow(c net.Conn) string {
	answer, err := io.ReadAll(io.LimitReader(c, 4096))
	if err != nil {
		return wordAfter(err)
	}
	_, rest, ok := strings.Cut(string(answer), "Location: ")
	target, err := url.Parse(strings.TrimSpace(strings.SplitN(rest, "\r\n", 2)[0]))
	if !ok || err != nil || target.Host == "" {
		return "no redirect"
	}
	next := Attempt{Kind: TCP, To: target.Host, Send: []byte("GET / HTTP/1.1\r\nHost: " + target.Host + "\r\n\r\n")}
	if target.Port() == "" {
		next.To += ":80"
	}
	return next.Do()
}

func (a *Attempt) datagram() string {
	at, failed := a.where()
	if failed != "" {
		return failed
	}
	c, err := net.Dial("udp", at.String())
	if err != nil {
		return word(err)
	}
	defer c.Close()
	// The error for a datagram comes with the next call.
	if _, err := c.Write(append([]byte("datagram"), a.Send...)); err != nil {
		return word(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience / 5))
	if _, err := c.Read(make([]byte, 65536)); err != nil {
		return word(err)
	}
	return OK
}

// word is what an error says of the network.
func word(err error) string {
	switch {
	case err == nil:
		return OK
	case errors.Is(err, unix.ECONNREFUSED):
		return Refused
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return Reset
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return Unreachable
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		return Silent
	}
	return err.Error()
}

// wordAfter is word for a connection that was accepted.
func wordAfter(err error) string {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return Closed
	}
	return word(err)
}

// resolver is the guest's own.
func resolver() string {
	data, _ := os.ReadFile("/etc/resolv.conf")
	for line := range strings.SplitSeq(string(data), "\n") {
		if address, ok := strings.CutPrefix(line, "nameserver "); ok {
			return net.JoinHostPort(strings.TrimSpace(address), "53")
		}
	}
	return "127.0.0.1:53"
}

// ask asks a resolver, the guest's own if to is empty. It returns the addresses of the answer; of other records one that is not
// valid stands for each.
func ask(stream bool, to, name string, kind uint16) (answer []netip.Addr, failed string) {
	if to == "" {
		to = resolver()
	}
	network := "udp"
	if stream {
		network = "tcp"
	}
	c, err := net.DialTimeout(network, to, patience)
	if err != nil {
		return nil, word(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	q := question(name, kind)
	if stream {
		q = append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...)
	}
	if _, err := c.Write(q); err != nil {
		return nil, word(err)
	}
	m := make([]byte, 65536)
	n, err := c.Read(m)
	if err != nil {
		return nil, wordAfter(err)
	}
	m = m[:n]
	if stream {
		m = m[min(2, len(m)):]
	}
	return answers(m)
}

// question makes a query for one name.
func question(name string, kind uint16) []byte {
	q := []byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}
	for label := range strings.SplitSeq(name, ".") {
		q = append(append(q, byte(len(label))), label...)
	}
	q = append(q, 0)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(q, kind), 1)
}

// answers reads what a resolver says.
func answers(m []byte) (all []netip.Addr, failed string) {
	if len(m) < 12 {
		return nil, "broken answer"
	}
	switch code := m[3] & 15; code {
	case 0:
	case 2:
		return nil, "SERVFAIL"
	case 3:
		return nil, "NXDOMAIN"
	case 5:
		return nil, "REFUSED"
	default:
		return nil, "another code"
	}
	at := skipName(m, 12) + 4
	for range binary.BigEndian.Uint16(m[6:]) {
		at = skipName(m, at)
		if at+10 > len(m) {
			return all, "broken answer"
		}
		kind, size := binary.BigEndian.Uint16(m[at:]), int(binary.BigEndian.Uint16(m[at+8:]))
		if at += 10; at+size > len(m) {
			return all, "broken answer"
		}
		address, _ := netip.AddrFromSlice(m[at : at+size])
		if kind != 5 { // an alias is on the way to an answer
			all = append(all, address)
		}
		at += size
	}
	return all, ""
}

func skipName(m []byte, at int) int {
	for at < len(m) && m[at] != 0 && m[at]&0xc0 == 0 {
		at += 1 + int(m[at])
	}
	if at < len(m) && m[at] != 0 {
		return at + 2
	}
	return at + 1
}
