package usernet

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

const (
	maxPings    = 32
	pingTimeout = 5 * time.Second
)

// ping passes an echo request on, if it may leave and the host lets this process send some (ping_group_range). When there are
// too many it gets lost, as such requests do.
func (n *Net) ping(v *verdict) {
	t := policy.Target{Protocol: policy.ICMP, Address: v.echo.remote}
	if !n.decide(&t).Allowed {
		n.link.enqueue(outbound{frame: n.prohibited(v.guest, v.packet)})
		return
	}
	select {
	case n.pings <- struct{}{}:
	default:
		return
	}
	request := v.echo
	request.data = slices.Clone(request.data) // the frame's only for now
	if !n.start(func() {
		defer func() { <-n.pings }()
		if data, ok := exchange(n.life, &request); ok {
			n.link.enqueue(outbound{frame: n.echoReply(&request, data)})
		}
	}) {
		<-n.pings
	}
}

// exchange sends a request of the host's and returns what the answer carried.
func exchange(ctx context.Context, e *echo) ([]byte, bool) {
	family, protocol, request, reply := unix.AF_INET, unix.IPPROTO_ICMP, byte(8), byte(0)
	if e.remote.Is6() {
		family, protocol, request, reply = unix.AF_INET6, unix.IPPROTO_ICMPV6, 128, 129
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, false
	}
	f := os.NewFile(uintptr(fd), "echo")
	conn, err := net.FilePacketConn(f)
	f.Close()
	if err != nil {
		return nil, false
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	conn.SetDeadline(time.Now().Add(pingTimeout))
	// The kernel fills in the identifier and the checksum.
	message := append([]byte{request, 0, 0, 0, 0, 0, byte(e.sequence >> 8), byte(e.sequence)}, e.data...)
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(e.remote, 0))
	if _, err := conn.WriteTo(message, to); err != nil {
		return nil, false
	}
	answer := make([]byte, len(message)+1)
	for {
		n, _, err := conn.ReadFrom(answer)
		if err != nil {
			return nil, false
		}
		if n >= echoSize && answer[0] == reply && bytes.Equal(answer[6:8], message[6:8]) {
			return answer[echoSize:n], true
		}
	}
}
