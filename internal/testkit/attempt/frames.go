package attempt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	card      = "eth0"
	etherIPv4 = 0x0800
	etherIPv6 = 0x86dd
	// afterFrames is how long what frames bring about may take.
	afterFrames = 500 * time.Millisecond
)

// frames sends frames and returns what the gateway sends back first, if that is an answer to somebody.
func (a *Attempt) frames() string {
	own, err := net.InterfaceByName(card)
	if err != nil {
		return err.Error()
	}
	gateway, err := gatewayAddress()
	if err != nil {
		return err.Error()
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(swapped(unix.ETH_P_ALL)))
	if err != nil {
		return err.Error()
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: swapped(unix.ETH_P_ALL), Ifindex: own.Index}); err != nil {
		return err.Error()
	}
	for _, f := range a.Frames {
		data, err := f.encode(own.HardwareAddr, gateway)
		if err == nil {
			_, err = unix.Write(fd, data)
		}
		if err != nil {
			return err.Error()
		}
	}
	return firstReply(fd, gateway)
}

// firstReply waits for a frame of the gateway that answers something.
func firstReply(fd int, gateway net.HardwareAddr) string {
	buffer := make([]byte, 65536)
	end := time.Now().Add(afterFrames)
	for {
		left := time.Until(end)
		if left <= 0 {
			return Silent
		}
		timeout := unix.NsecToTimeval(int64(left))
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
			return err.Error()
		}
		n, err := unix.Read(fd, buffer)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return err.Error()
		}
		if n >= 14 && string(buffer[6:12]) == string(gateway) {
			if reply := describe(buffer[:n]); reply != "" {
				return reply
			}
		}
	}
}

// gatewayAddress asks the kernel, which has it when somebody has spoken to the gateway.
func gatewayAddress() (net.HardwareAddr, error) {
	_, _ = (&net.Dialer{Timeout: patience}).Dial("tcp", "10.0.2.2:9") // refused, or whatever
	data, err := os.ReadFile("/proc/net/arp")
	if err != nil {
		return nil, err
	}
	for line := range strings.SplitSeq(string(data), "\n") {
		if fields := strings.Fields(line); len(fields) > 3 && fields[0] == "10.0.2.2" {
			return net.ParseMAC(fields[3])
		}
	}
	return nil, errors.New("nobody knows the gateway's address")
}

func (f *Frame) encode(own, gateway net.HardwareAddr) ([]byte, error) {
	var frame []byte
	for _, name := range []string{f.Destination, f.Source} {
		address := own
		switch name {
		case Own:
		case Gateway:
			address = gateway
		default:
			var err error
			if address, err = net.ParseMAC(name); err != nil {
				return nil, err
			}
		}
		frame = append(frame, address...)
	}
	frame = binary.BigEndian.AppendUint16(frame, f.Type)
	payload := f.Payload
	if f.Type == 0x0806 && len(payload) >= 14 && string(payload[8:14]) == "OWNMAC" {
		payload = append(append(append([]byte(nil), payload[:8]...), own...), payload[14:]...)
	}
	return append(frame, payload...), nil
}

// describe says what a frame answers, empty if it is no answer.
func describe(frame []byte) string {
	p := frame[14:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case etherIPv4:
		if len(p) >= 28 {
			return carried(p[9], "icmp", p[int(p[0]&15)*4:])
		}
	case etherIPv6:
		if len(p) >= 48 {
			return carried(p[6], "icmp6", p[40:])
		}
	}
	return ""
}

func carried(protocol byte, control string, p []byte) string {
	switch {
	case protocol == unix.IPPROTO_TCP && len(p) >= 14 && p[13]&4 != 0:
		return "rst"
	case protocol == unix.IPPROTO_TCP && len(p) >= 14 && p[13]&0x12 == 0x12:
		return "synack"
	case protocol == unix.IPPROTO_UDP:
		return "udp"
	case protocol == unix.IPPROTO_ICMP && p[0] != 11, protocol == unix.IPPROTO_ICMPV6 && p[0] != 3 && (p[0] < 130 || p[0] > 143):
		return fmt.Sprintf("%s-%d-%d", control, p[0], p[1])
	}
	return "" // what neighbours say to each other, and that something earlier took too long
}

func swapped(v uint16) uint16 { return v<<8 | v>>8 }
