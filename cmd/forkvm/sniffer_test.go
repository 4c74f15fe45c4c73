package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"sort"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// sniffer notes which packets come over the world's link.
type sniffer struct {
	fd   int
	mu   sync.Mutex
	seen map[string]bool
}

func newSniffer(link string) (*sniffer, error) {
	i, err := net.InterfaceByName(link)
	if err != nil {
		return nil, err
	}
	all := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
		return nil, err
	}
	s := &sniffer{fd: fd, seen: map[string]bool{}}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}); err != nil {
		return nil, err
	}
	go s.run()
	return s, nil
}

// run reads what comes, so that it finds room.
func (s *sniffer) run() {
	for {
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && err != syscall.EINTR {
			return
		}
		s.mu.Lock()
		s.drainLocked()
		s.mu.Unlock()
	}
}

func (s *sniffer) drainLocked() {
	buffer := make([]byte, 2048)
	for {
		n, from, err := unix.Recvfrom(s.fd, buffer, unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return
		}
		if l, ok := from.(*unix.SockaddrLinklayer); ok && l.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if line := lineOf(buffer[:n]); line != "" {
			s.seen[line] = true
		}
	}
}

// look returns what has come since the call before.
func (s *sniffer) look() (lines []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drainLocked()
	for line, fresh := range s.seen {
		if fresh {
			lines = append(lines, line)
			s.seen[line] = false
		}
	}
	sort.Strings(lines)
	return lines
}

func (s *sniffer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.seen)
}

// lineOf says what a packet is, nothing if it is what neighbours say to each other.
func lineOf(p []byte) string {
	if len(p) < 20 {
		return ""
	}
	switch p[0] >> 4 {
	case 4:
		return contentOf(netip.AddrFrom4([4]byte(p[16:20])), p[9], p[int(p[0]&15)*4:])
	case 6:
		if len(p) >= 40 {
			return contentOf(netip.AddrFrom16([16]byte(p[24:40])), p[6], p[40:])
		}
	}
	return ""
}

func contentOf(to netip.Addr, protocol byte, p []byte) string {
	if to.IsMulticast() {
		return ""
	}
	switch {
	case protocol == unix.IPPROTO_ICMP && len(p) > 0 && (p[0] == 3 || p[0] == 11):
		return "" // the host's errors
	case protocol == unix.IPPROTO_ICMPV6 && len(p) > 0 && (p[0] < 128 || p[0] >= 133 && p[0] <= 137):
		return ""
	case protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6:
		return fmt.Sprintf("icmp %v", to)
	case len(p) < 8 || protocol != unix.IPPROTO_TCP && protocol != unix.IPPROTO_UDP:
		return fmt.Sprintf("ip-%d %v", protocol, to)
	}
	at := netip.AddrPortFrom(to, binary.BigEndian.Uint16(p[2:]))
	switch {
	case protocol == unix.IPPROTO_TCP:
		return fmt.Sprintf("tcp %v", at)
	case at.Port() == 53:
		return fmt.Sprintf("dns %v %s", to, questionOf(p[8:]))
	}
	return fmt.Sprintf("udp %v", at)
}
