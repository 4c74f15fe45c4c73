package main

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// runWorld is the world's own process: it does as standard input says.
func runWorld(files string) error {
	lines := bufio.NewScanner(os.Stdin)
	if !lines.Scan() {
		return errors.New("nobody says which link is the world's")
	}
	name := lines.Text()
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/accept_dad", []byte("0"), 0o644); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"addr", "add", worldAddress + "/24", "dev", name},
		{"link", "set", name, "up"},
		{"-6", "addr", "add", worldAddress6 + "/64", "dev", name},
		{"route", "add", "local", "0.0.0.0/0", "dev", "lo"}, // every address is its own
		{"-6", "route", "add", "local", "::/0", "dev", "lo"},
	} {
		if err := busyboxIP(args...); err != nil {
			return err
		}
	}
	sniffer, err := newSniffer(name)
	if err != nil {
		return err
	}
	if err := serveWorld(files); err != nil {
		return err
	}
	fmt.Println(worldReady)
	for lines.Scan() {
		switch lines.Text() {
		case "saw":
			for _, line := range sniffer.look() {
				fmt.Println(line)
			}
			fmt.Println(endOfSeen)
		case "forget":
			sniffer.forget()
		}
	}
	return nil
}

// serveWorld opens the world's ports, at every address.
func serveWorld(files string) error {
	certificate, err := worldCertificate()
	if err != nil {
		return err
	}
	var web http.Handler
	if files != "" {
		encoded := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[0]})
		if err := os.WriteFile(filepath.Join(files, "certificate.pem"), encoded, 0o644); err != nil {
			return err
		}
		web = http.FileServer(http.Dir(files))
	}
	for _, port := range []int{7, 22, 53, 80, 443, 853, 5000, 8080} {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		if port == 443 {
			l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{certificate}})
		}
		if web != nil && (port == 80 || port == 443) {
			go http.Serve(l, web)
			continue
		}
		go acceptAll(l, port)
	}
	for _, network := range []string{"udp4", "udp6"} {
		for _, port := range []int{7, 53, 69, 443, 5000} {
			c, err := net.ListenUDP(network, &net.UDPAddr{Port: port})
			if err != nil {
				return err
			}
			if err := control(c, network == "udp6"); err != nil {
				return err
			}
			go answerAll(c, port)
		}
	}
	return nil
}

// worldCertificate is one that nobody else has signed, for some names.
func worldCertificate() (c tls.Certificate, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return c, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "world"}, DNSNames: []string{"git.good.test", "git.other.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(365 * 24 * time.Hour),
		BasicConstraintsValid: true, IsCA: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// control has a socket say where datagrams came to, and answer from there.
func control(c *net.UDPConn, six bool) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		if six {
			inner = errors.Join(
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1), unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1))
			return
		}
		inner = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
	})
	return errors.Join(err, inner)
}

// acceptAll answers requests of HTTP and queries, and echoes at port 7; at other ports it keeps the connection until the client
// ends it.
func acceptAll(l net.Listener, port int) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			switch port {
			case 80, 443, 8080:
				answerHTTP(c)
			case 7:
				io.Copy(c, c)
			case 53:
				var size [2]byte
				io.ReadFull(c, size[:])
				m := make([]byte, binary.BigEndian.Uint16(size[:]))
				io.ReadFull(c, m)
				a := resolve(m)
				if a == nil {
					return
				}
				c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...))
			default:
				io.Copy(io.Discard, c)
			}
		}()
	}
}

// answerHTTP says hello, or where to go if the path is that: /to/URL.
func answerHTTP(c net.Conn) {
	r := bufio.NewReader(c)
	line, _ := r.ReadString('\n')
	for {
		if field, err := r.ReadString('\n'); err != nil || strings.TrimSpace(field) == "" {
			break
		}
	}
	if fields := strings.Fields(line); len(fields) > 1 {
		if to, ok := strings.CutPrefix(fields[1], "/to/"); ok {
			fmt.Fprintf(c, "HTTP/1.0 302 Found\r\nLocation: %s\r\n\r\n", to)
			return
		}
	}
	fmt.Fprint(c, "HTTP/1.0 200 OK\r\n\r\nhello from the world\n")
}

// answerAll echoes datagrams; at the port of the domain name system it resolves names.
func answerAll(c *net.UDPConn, port int) {
	buffer, control := make([]byte, 65536), make([]byte, 256)
	for {
		n, k, _, from, err := c.ReadMsgUDPAddrPort(buffer, control)
		if err != nil {
			return
		}
		answer := buffer[:n]
		if port == 53 {
			if answer = resolve(answer); answer == nil {
				continue
			}
		}
		// What says where it came to says where the answer comes from.
		c.WriteMsgUDPAddrPort(answer, control[:k], from)
	}
}

// questionOf is the name that is asked for.
func questionOf(m []byte) string {
	var labels []string
	for at := 12; at < len(m) && m[at] != 0 && at+1+int(m[at]) <= len(m); at += 1 + int(m[at]) {
		labels = append(labels, string(m[at+1:at+1+int(m[at])]))
	}
	return strings.Join(labels, ".")
}

// Types of records.
const (
	recordA     = 1
	recordCNAME = 5
	recordNULL  = 10
	recordTXT   = 16
	recordAAAA  = 28
	recordHTTPS = 65
	recordAXFR  = 252
)

// hostile names are bound to what a guest should not reach; the last address stays.
var hostile = map[string][]string{
	"rebound.":   {"169.254.169.254"},
	"private.":   {"10.1.2.3"},
	"ourhost.":   {hostAddress},
	"local.":     {"127.0.0.53"},
	"flips.":     {worldAddress, "169.254.169.254"},
	"wanders.":   {"20.5.0.1", "20.5.0.2"},
	"aliasmeta.": {"169.254.169.254"},
}

// asked is how often hostile names were asked for.
var asked = struct {
	sync.Mutex
	counts map[string]int
}{counts: map[string]int{}}

// addressOf is what a name is bound to now.
func addressOf(name string) netip.Addr {
	for prefix, addresses := range hostile {
		if strings.HasPrefix(name, prefix) {
			asked.Lock()
			defer asked.Unlock()
			i := min(asked.counts[prefix], len(addresses)-1)
			asked.counts[prefix]++
			return netip.MustParseAddr(addresses[i])
		}
	}
	return netip.MustParseAddr(worldAddress)
}

// resolve answers with an address of the world's, or of hostile names; names that begin with alias are aliases of aliases.
func resolve(m []byte) []byte {
	if len(m) < 16 {
		return m
	}
	name := questionOf(m)
	end := 12 + len(name) + 2 + 4
	if end > len(m) {
		return m
	}
	a := append([]byte(nil), m[:end]...)
	a[2], a[3] = 0x81, 0x80
	clear(a[6:12])
	switch {
	case strings.HasPrefix(name, "none."):
		a[3] |= 3 // there is no such name
		return a
	case strings.HasPrefix(name, "broken."):
		a[3] |= 2
		return a
	case strings.HasPrefix(name, "silent."):
		return nil
	}
	add := func(kind uint16, data []byte) {
		a[7]++
		a = binary.BigEndian.AppendUint16(append(a, 0xc0, 12), kind)
		a = append(a, 0, 1, 0, 0, 0, 60)
		a = append(binary.BigEndian.AppendUint16(a, uint16(len(data))), data...)
	}
	switch kind := binary.BigEndian.Uint16(m[end-4:]); kind {
	case recordA:
		if strings.HasPrefix(name, "alias") {
			add(recordCNAME, []byte("\x01x\x04evil\x07example\x00"))
		}
		add(recordA, addressOf(name).AsSlice())
		for i := range 59 {
			if strings.HasPrefix(name, "many.") {
				add(recordA, []byte{93, 184, 216, byte(100 + i)})
			}
		}
	case recordAAAA:
	default:
		add(kind, []byte("\x04text"))
	}
	return a
}
