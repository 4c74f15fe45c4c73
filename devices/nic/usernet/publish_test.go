package usernet

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// freePort is one of the host's that nobody has.
func freePort(t *testing.T, protocol policy.Protocol, guest uint16) policy.Port {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return policy.Port{Host: l.Addr().(*net.TCPAddr).AddrPort(), Guest: guest, Protocol: protocol}
}

func TestPublish(t *testing.T) {
	web, echo, nobody := freePort(t, policy.TCP, 80), freePort(t, policy.UDP, 7), freePort(t, policy.TCP, 81)
	g := newGuest(t, Config{
		Policy: nictest.Compile(t, policy.Policy{}), Ports: []policy.Port{web, echo, nobody},
	})
	at := func(port uint16) tcpip.FullAddress { return full(netip.AddrPortFrom(nic.Guest4, port)) }
	l, err := gonet.ListenTCP(g.stack, at(80), networkProtocol(nic.Guest4))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
	c, err := net.Dial("tcp", web.Host.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
	go func() {
		c.Write(sent)
		c.(*net.TCPConn).CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d of %d bytes came back: %v", len(got), len(sent), err)
	}
	if c, err := net.Dial("tcp", nobody.Host.String()); err == nil {
		if _, err := io.ReadAll(c); err == nil {
			t.Error("a port that the guest does not serve ends politely")
		}
		c.Close()
	}

	own := at(7)
	server, err := gonet.DialUDP(g.stack, &own, nil, networkProtocol(nic.Guest4))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		buffer := make([]byte, 100)
		for k, from, err := server.ReadFrom(buffer); err == nil; k, from, err = server.ReadFrom(buffer) {
			server.WriteTo(buffer[:k], from)
		}
	}()
	for _, says := range []string{"one", "two"} {
		u, err := net.Dial("udp", echo.Host.String())
		if err != nil {
			t.Fatal(err)
		}
		defer u.Close()
		u.SetDeadline(time.Now().Add(patience))
		u.Write([]byte(says))
		got := make([]byte, 10)
		if k, err := u.Read(got); err != nil || string(got[:k]) != says {
			t.Errorf("%q came back of %q: %v", got[:k], says, err)
		}
	}

	// The far ends of what came in are gone after a restore, too.
	c, err = net.Dial("tcp", web.Host.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write([]byte("x"))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	state, err := g.net.Save()
	if err != nil || !bytes.Contains(state, []byte(`:80"`)) {
		t.Errorf("the state is %s: %v", state, err)
	}
	if err := g.net.Restore(state); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a connection goes on after a restore")
	}
	if _, err := New(Config{Guest: guestMAC, Policy: nictest.Compile(t, policy.Policy{}), Ports: []policy.Port{web}}); err == nil {
		t.Error("a port is published twice")
	}
}
