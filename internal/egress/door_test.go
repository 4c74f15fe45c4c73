package egress

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// serve has whatever comes to a port sent back, until the process ends.
func (a attempt) serve() error {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(a.To))
	if err != nil {
		return err
	}
	u, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(a.To))
	if err != nil {
		return err
	}
	for _, c := range []syscall.Conn{l, u} { // so that an attempt can come from the same port
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = shared(int(fd)) }); err != nil || failed != nil {
			return errors.Join(err, failed)
		}
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go io.Copy(c, c)
		}
	}()
	go func() {
		buffer := make([]byte, 1500)
		for {
			n, from, err := u.ReadFromUDPAddrPort(buffer)
			if err != nil {
				return
			}
			_, _ = u.WriteToUDPAddrPort(buffer[:n], from) // or it is refused
		}
	}()
	return nil
}

// shared lets several sockets have one port.
func shared(fd int) error {
	return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
}

// asks says something to a port of the process's: whether it comes back. It does not when the kernel has refused that.
func (p *prisoner) asks(kind int, at netip.AddrPort) bool {
	p.t.Helper()
	family, address := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()})
	if at.Addr().Is4() {
		family, address = unix.AF_INET, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer unix.Close(fd)
	before := p.refused()
	if err := unix.Connect(fd, address); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		p.t.Fatal(err)
	}
	said := false
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if !said {
			_, err := unix.Write(fd, []byte("hello"))
			said = err == nil
		}
		if n, err := unix.Read(fd, make([]byte, 16)); err == nil && n == 5 {
			return true
		}
		if p.refused() > before {
			return false
		}
	}
	p.t.Fatalf("%v: neither an answer nor a refusal", at)
	return false
}

func (p *prisoner) refused() uint64 {
	p.t.Helper()
	r, err := RefusedBy(p.group.Path)
	if err != nil {
		p.t.Fatal(err)
	}
	return r.Calls + r.Packets
}

// TestDoorsAnswer: a process that may send nothing answers those who come to its published ports, and nobody else, from there or
// from anywhere.
func TestDoorsAnswer(t *testing.T) {
	requireEnforcement(t)
	u := newUplink(t)
	var ports []policy.Port
	for _, text := range []string{"127.0.0.1:7000:1", "127.0.0.1:7000:1/udp", "0.0.0.0:7001:1", "0.0.0.0:7001:1/udp"} {
		p, err := policy.ParsePort(text)
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, p)
	}
	p := imprison(t, "doors", policy.Policy{Mode: policy.NoNetwork}, policy.Surroundings{}, ports...)
	for _, at := range []string{"127.0.0.1:7000", "93.184.216.1:7000", "[::]:7001", "127.0.0.1:7002"} {
		if said := p.tries(attempt{How: "serve", To: to(at)}); said != "" {
			t.Fatal(said)
		}
	}
	for _, tt := range []struct {
		at   string
		want bool
	}{
		{"127.0.0.1:7000", true},
		{"127.0.0.1:7001", true},
		{"[::1]:7001", true},
		{"93.184.216.1:7001", true},
		{"127.0.0.1:7002", false},
		{"93.184.216.1:7000", false}, // not at this address
	} {
		if got := p.asks(unix.SOCK_STREAM, to(tt.at)); got != tt.want {
			t.Errorf("tcp %s answers: %v", tt.at, got)
		}
		if got := p.asks(unix.SOCK_DGRAM, to(tt.at)); got != tt.want {
			t.Errorf("udp %s answers: %v", tt.at, got)
		}
	}
	u.saw(t)
	for _, a := range []attempt{
		{How: "send", To: to("9.9.9.9:53"), From: to("0.0.0.0:7001")},
		{How: "udp", To: to("9.9.9.9:53"), From: to("0.0.0.0:7001")},
		{How: "tcp", To: to("9.9.9.9:80"), From: to("0.0.0.0:7001")},
		{How: "syn", To: to("9.9.9.9:80"), From: to("0.0.0.0:7001")},
		{How: "send", To: to("9.9.9.9:53")},
		{How: "tcp", To: to("9.9.9.9:80")},
	} {
		if said := p.tries(a); said == "" || u.saw(t) > 0 {
			t.Errorf("%v from %v: the process was told %q", a, a.From, said)
		}
	}
}
