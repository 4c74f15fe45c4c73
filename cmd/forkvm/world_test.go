package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
)

// actsAsWorld makes the test binary the world: every host on the internet, in a network namespace of its own.
const actsAsWorld = "FORKVM_TEST_AS_WORLD"

// worldAddress is where the world's own servers are; it answers for all other addresses, too.
const worldAddress = "93.184.216.34"

// world is the world as the test sees it: what has reached it, a line each.
type world struct {
	mu   sync.Mutex
	seen []string
}

// saw returns what has come so far.
func (w *world) saw() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.seen...)
}

// startWorld connects this machine to a world: packets to everywhere go there, and the machine's resolver is one of it.
func startWorld(t *testing.T) *world {
	t.Helper()
	testkit.RequireKVM(t)
	if !testkit.InLab() {
		t.Skip("changes the machine's routes and resolver: it is for the lab")
	}
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("busybox", append([]string{"ip"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), actsAsWorld+"=1")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := &world{}
	ready := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if lines.Text() == "ready" {
				close(ready)
				continue
			}
			w.mu.Lock()
			w.seen = append(w.seen, lines.Text())
			w.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		stdin.Close() // the world ends with it, and the link with the world
		reader.Wait()
		cmd.Wait()
	})
	ip("link", "add", "toworld", "type", "veth")
	peer := otherVeth(t)
	ip("link", "set", peer, "netns", fmt.Sprint(cmd.Process.Pid))
	ip("addr", "add", "93.184.216.1/24", "dev", "toworld")
	ip("link", "set", "toworld", "up")
	fmt.Fprintln(stdin, peer)
	select {
	case <-ready:
	case <-time.After(patience):
		t.Fatal("the world does not answer")
	}
	ip("route", "add", "default", "via", worldAddress)
	replaceFile(t, "/etc/resolv.conf", "nameserver "+worldAddress+"\n")
	return w
}

// otherVeth is the name that the kernel has given the other end of the link.
func otherVeth(t *testing.T) string {
	entries, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "veth") {
			return e.Name()
		}
	}
	t.Fatal("the link has no other end")
	return ""
}

// replaceFile writes a file until the test ends.
func replaceFile(t *testing.T, path, content string) {
	t.Helper()
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.WriteFile(path, before, 0o644) })
}

// runWorld is the world's own process.
func runWorld() error {
	lines := bufio.NewReader(os.Stdin)
	name, err := lines.ReadString('\n')
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"addr", "add", worldAddress + "/24", "dev", strings.TrimSpace(name)},
		{"link", "set", strings.TrimSpace(name), "up"},
		{"route", "add", "local", "0.0.0.0/0", "dev", "lo"}, // every address is its own
	} {
		if out, err := exec.Command("busybox", append([]string{"ip"}, args...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	for _, port := range []int{7, 22, 53, 80, 443, 853, 8080} {
		l, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		go acceptAll(l)
	}
	for _, port := range []int{53, 69, 443} {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{Port: port})
		if err != nil {
			return err
		}
		if err := control(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1) }); err != nil {
			return err
		}
		go answerAll(c, port)
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, lines)
	return err
}

func control(c *net.UDPConn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	return errors.Join(raw.Control(func(fd uintptr) { inner = do(int(fd)) }), inner)
}

// acceptAll answers requests of HTTP and queries; on other ports it keeps the connection until the client ends it.
func acceptAll(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		fmt.Printf("tcp %s\n", c.LocalAddr())
		go func() {
			defer c.Close()
			switch c.LocalAddr().(*net.TCPAddr).Port {
			case 80, 8080:
				bufio.NewReader(c).ReadString('\n')
				fmt.Fprint(c, "HTTP/1.0 200 OK\r\n\r\nhello from the world\n")
			case 53:
				var size [2]byte
				io.ReadFull(c, size[:])
				m := make([]byte, binary.BigEndian.Uint16(size[:]))
				io.ReadFull(c, m)
				a := resolve(m)
				c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(a))), a...))
			default:
				io.Copy(io.Discard, c)
			}
		}()
	}
}

// answerAll echoes datagrams; at the port of the domain name system it resolves names.
func answerAll(c *net.UDPConn, port int) {
	buffer, control := make([]byte, 4096), make([]byte, 256)
	for {
		n, k, _, from, err := c.ReadMsgUDPAddrPort(buffer, control)
		if err != nil {
			return
		}
		to := "?"
		if messages, err := unix.ParseSocketControlMessage(control[:k]); err == nil && len(messages) > 0 {
			to = netip.AddrFrom4([4]byte(messages[0].Data[8:12])).String() // in_pktinfo.ipi_addr
		}
		answer := buffer[:n]
		if port == 53 {
			fmt.Printf("dns %s %s\n", to, questionOf(answer))
			answer = resolve(answer)
		} else {
			fmt.Printf("udp %s:%d\n", to, port)
		}
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

// resolve answers with an address of the world's; names that begin with rebound are bound to the metadata address.
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
	if m[end-3] != 1 { // no address of IPv4
		return a
	}
	a[7] = 1
	address := netip.MustParseAddr(worldAddress).As4()
	if strings.HasPrefix(name, "rebound.") {
		address = [4]byte{169, 254, 169, 254}
	}
	a = append(a, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
	return append(a, address[:]...)
}

// eventually looks again and again, with a little time between. How often bounds it: time is counted where this runs.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 60 {
		if done() {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}
