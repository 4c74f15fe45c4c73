package usernet

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxDatagram is the largest payload of UDP.
const maxDatagram = 65507

// datagramBuffer has room for any datagram.
type datagramBuffer [maxDatagram]byte

// datagramBuffers are used again.
type datagramBuffers struct{ pool sync.Pool }

func (d *datagramBuffers) get() *datagramBuffer {
	if b, ok := d.pool.Get().(*datagramBuffer); ok {
		return b
	}
	return new(datagramBuffer)
}

func (d *datagramBuffers) put(b *datagramBuffer) { d.pool.Put(b) }

// outlet is a socket of the host that datagrams leave by, without waiting.
type outlet struct {
	raw syscall.RawConn
	to  unix.Sockaddr // nil: where the socket is connected to
}

func newOutlet(c net.Conn, to unix.Sockaddr) (outlet, error) {
	socket, ok := c.(syscall.Conn)
	if !ok {
		return outlet{}, fmt.Errorf("%T is no socket", c)
	}
	raw, err := socket.SyscallConn()
	return outlet{raw, to}, err
}

// send sends a datagram. One that cannot be sent at once is lost, as datagrams may be.
func (o *outlet) send(b []byte) {
	_ = o.raw.Write(func(fd uintptr) bool {
		if o.to == nil {
			_, _ = unix.Write(int(fd), b)
		} else {
			_ = unix.Sendto(int(fd), b, 0, o.to)
		}
		return true
	})
}

// socketAddress is an address as the socket says it that has received from there.
func socketAddress(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	to := &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	if zone := a.Addr().Zone(); zone != "" {
		if i, err := net.InterfaceByName(zone); err == nil {
			to.ZoneId = uint32(i.Index)
		}
	}
	return to
}
