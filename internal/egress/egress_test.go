package egress

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/testkit"
)

// actsAsSuspect makes the test binary a process of which nobody knows what it is up to: it makes the attempts that it reads and
// says what came of each.
const actsAsSuspect = "FORKVM_TEST_AS_SUSPECT"

func TestMain(m *testing.M) {
	if os.Getenv(actsAsSuspect) != "" {
		if err := suspect(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// attempt is something to send somewhere.
type attempt struct {
	How  string // tcp, udp (connected), send (UDP, not connected), raw (UDP with a header of our own), syn, options, echo; serve
	To   netip.AddrPort
	From netip.AddrPort // a port of our own, if it matters which
	Into bool           // a socket of IPv6 for an address of IPv4
	More int            // how often again, on the same socket
}

func (a attempt) String() string { return fmt.Sprintf("%s %v into=%v", a.How, a.To, a.Into) }

// suspect makes attempts, for each of which it says how the call ended.
func suspect() error {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var a attempt
		if err := in.Decode(&a); err != nil {
			return nil
		}
		said := ""
		do := a.make
		if a.How == "serve" {
			do = a.serve
		}
		if err := do(); err != nil {
			said = err.Error()
		}
		if err := out.Encode(said); err != nil {
			return err
		}
	}
}

// make returns nil if the packet has left, as far as the process can tell.
func (a attempt) make() error {
	family, address := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(a.To.Port()), Addr: [4]byte(a.To.Addr().AsSlice())})
	if a.To.Addr().Is6() || a.Into {
		family, address = unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.To.Port()), Addr: a.To.Addr().As16()}
	}
	kind, protocol := unix.SOCK_DGRAM, 0
	switch a.How {
	case "tcp":
		kind = unix.SOCK_STREAM
	case "raw":
		kind, protocol = unix.SOCK_RAW, unix.IPPROTO_UDP
	case "syn":
		kind, protocol = unix.SOCK_RAW, unix.IPPROTO_TCP
	case "echo":
		kind, protocol = unix.SOCK_RAW, unix.IPPROTO_ICMP
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if a.From.IsValid() && kind != unix.SOCK_RAW {
		from := &unix.SockaddrInet4{Port: int(a.From.Port()), Addr: a.From.Addr().As4()}
		if err := errors.Join(shared(fd), unix.Bind(fd, from)); err != nil {
			return err
		}
	}
	data := []byte("0123456789abcdef")
	switch a.How {
	case "tcp":
		if err = unix.Connect(fd, address); errors.Is(err, unix.EINPROGRESS) {
			err = nil
		}
		return err
	case "udp":
		if err := unix.Connect(fd, address); err != nil {
			return err
		}
		_, err = unix.Write(fd, data)
		return err
	case "options": // a loose source route by way of somebody who is allowed
		route := append([]byte{131, 7, 4}, 9, 9, 9, 9)
		if err := unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_OPTIONS, string(append(route, 1))); err != nil {
			return err
		}
	case "raw": // source, destination, length, no checksum
		header := binary.BigEndian.AppendUint16(nil, 5)
		header = binary.BigEndian.AppendUint16(header, a.To.Port())
		header = binary.BigEndian.AppendUint16(header, uint16(8+len(data)))
		data = append(append(header, 0, 0), data...)
		address = &unix.SockaddrInet4{Addr: [4]byte(a.To.Addr().AsSlice())}
	case "syn": // ports, numbers, length and flags, no checksum
		header := binary.BigEndian.AppendUint16(nil, a.From.Port())
		header = binary.BigEndian.AppendUint16(header, a.To.Port())
		data = append(header, make([]byte, 16)...)
		data[12], data[13] = 5<<4, 2
		address = &unix.SockaddrInet4{Addr: a.To.Addr().As4()}
	case "echo":
		data = []byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1}
		address = &unix.SockaddrInet4{Addr: [4]byte(a.To.Addr().AsSlice())}
	}
	for range a.More {
		if err := unix.Sendto(fd, data, 0, address); err != nil {
			return err
		}
	}
	return unix.Sendto(fd, data, 0, address)
}

// uplink is a network namespace with one way out, on which the test sees everything.
type uplink struct{ capture int }

// newUplink moves the calling goroutine's thread to a network of its own, for good.
func newUplink(t testing.TB) *uplink {
	t.Helper()
	testkit.RequireRoot(t)
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("busybox", append([]string{"ip"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	ip("link", "set", "lo", "up")
	// A network of packets without a neighbourhood to ask.
	tun, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tun.Close() })
	request, err := unix.NewIfreq("out")
	if err != nil {
		t.Fatal(err)
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(int(tun.Fd()), unix.TUNSETIFF, request); err != nil {
		t.Fatal(err)
	}
	ip("addr", "add", "93.184.216.1/24", "dev", "out")
	ip("link", "set", "out", "up")
	ip("route", "add", "default", "dev", "out")
	ip("-6", "route", "add", "default", "dev", "out")
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return &uplink{fd}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// saw says which of our packets have passed since the last call, on any interface. The neighbourhood's own do not count.
func (u *uplink) saw(t testing.TB) (n int) {
	t.Helper()
	packet := make([]byte, 2048)
	for {
		size, _, err := unix.Recvfrom(u.capture, packet, 0)
		if errors.Is(err, unix.EAGAIN) {
			return n
		}
		if err != nil {
			t.Fatal(err)
		}
		if size < 20 || packet[0]>>4 == 6 && packet[6] == unix.IPPROTO_ICMPV6 || packet[0]>>4 == 6 && packet[6] == 0 {
			continue
		}
		n++
	}
}

// prisoner is a process in a group.
type prisoner struct {
	t     testing.TB
	group *Group
	in    *json.Encoder
	out   *json.Decoder
}

// imprison starts a process in a group of its own under a policy.
func imprison(t testing.TB, name string, p policy.Policy, around policy.Surroundings, ports ...policy.Port) *prisoner {
	t.Helper()
	g := create(t, name, p, around, ports...)
	t.Cleanup(func() {
		if err := Remove(g.Path, name); err != nil {
			t.Error(err)
		}
	})
	return start(t, g)
}

func unnoted(string) error { return nil }

// create makes a group under a policy that is in force.
func create(t testing.TB, name string, p policy.Policy, around policy.Surroundings, ports ...policy.Port) *Group {
	t.Helper()
	g, err := Create(name, unnoted)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	if err = g.Admit(regions(t, p, around), ports); err == nil {
		err = g.Wait()
	}
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// start starts a process in a group, nil for one that is free.
func start(t testing.TB, g *Group) *prisoner {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), actsAsSuspect+"=1")
	cmd.Stderr = os.Stderr
	if g != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(g.File().Fd())}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Wait()
	})
	return &prisoner{t, g, json.NewEncoder(in), json.NewDecoder(out)}
}

func regions(t testing.TB, p policy.Policy, around policy.Surroundings) []policy.Region {
	t.Helper()
	rules, err := p.Compile()
	if err != nil {
		t.Fatal(err)
	}
	return rules.Regions(around)
}

// tries returns what the process was told.
func (p *prisoner) tries(a attempt) (said string) {
	p.t.Helper()
	if err := errors.Join(p.in.Encode(a), p.out.Decode(&said)); err != nil {
		p.t.Fatal(err)
	}
	return said
}

func requireEnforcement(t testing.TB) {
	t.Helper()
	if testkit.InLab() {
		testkit.RequireKVM(t) // by which the lab finds the test
	}
	testkit.RequireRoot(t)
	if err := Available(); err != nil {
		testkit.Require(t, "ebpf", err.Error())
	}
}

func to(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

// TestGroupReachesWhatIsAllowed has a process in a group try everything that it can: what is allowed gets out, nothing else does.
func TestGroupReachesWhatIsAllowed(t *testing.T) {
	requireEnforcement(t)
	u := newUplink(t)
	around := policy.Surroundings{
		Host:      []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("93.184.216.1")},
		Resolvers: []netip.AddrPort{to("10.9.9.9:53")},
	}
	addresses := policy.Policy{Mode: policy.Allowlist, Deny: []string{"9.9.8.0/24"},
		Allow: []string{"9.9.0.0/16:1000-1999", "9.9.9.9:80/tcp", "10.1.0.0/16:5432", "[2001:4860::/32]:443", "8.8.8.8/icmp"}}
	named := policy.Policy{Mode: policy.Allowlist, Allow: []string{"example.org:443", "*.example.org:8000-8080/udp"}}
	sites := policy.Policy{Mode: policy.Public, Allow: []string{"[64:ff9b:1::/48]:443", "[2001::/32]:443"}}
	tests := []struct {
		policy  policy.Policy
		attempt attempt
		allowed bool
	}{
		{addresses, attempt{How: "tcp", To: to("9.9.9.9:80")}, true},
		{addresses, attempt{How: "udp", To: to("9.9.9.9:80")}, false},
		{addresses, attempt{How: "tcp", To: to("9.9.9.9:81")}, false},
		{addresses, attempt{How: "tcp", To: to("9.9.9.8:1000")}, true},
		{addresses, attempt{How: "udp", To: to("9.9.9.8:1999")}, true},
		{addresses, attempt{How: "send", To: to("9.9.9.8:1500")}, true},
		{addresses, attempt{How: "send", To: to("9.9.9.8:2000")}, false},
		{addresses, attempt{How: "tcp", To: to("9.9.9.8:999")}, false},
		{addresses, attempt{How: "tcp", To: to("9.9.8.8:1000")}, false}, // denied
		{addresses, attempt{How: "tcp", To: to("9.9.9.9:80"), Into: true}, true},
		{addresses, attempt{How: "tcp", To: to("9.9.9.9:82"), Into: true}, false},
		{addresses, attempt{How: "send", To: to("9.9.9.8:1500"), Into: true}, true},
		{addresses, attempt{How: "send", To: to("9.9.9.8:25"), Into: true}, false},
		{addresses, attempt{How: "tcp", To: to("10.1.2.3:5432")}, true},
		{addresses, attempt{How: "tcp", To: to("10.2.2.3:5432")}, false},
		{addresses, attempt{How: "tcp", To: to("[2001:4860::1]:443")}, true},
		{addresses, attempt{How: "send", To: to("[2001:4860::1]:443")}, true},
		{addresses, attempt{How: "send", To: to("[2001:4860::1]:444")}, false},
		{addresses, attempt{How: "tcp", To: to("[2001:4861::1]:443")}, false},
		{addresses, attempt{How: "tcp", To: to("169.254.169.254:80")}, false},
		{addresses, attempt{How: "tcp", To: to("127.0.0.1:80")}, false},
		{addresses, attempt{How: "tcp", To: to("0.0.0.0:80")}, false},
		{addresses, attempt{How: "send", To: to("10.9.9.9:53")}, false}, // it has no names to ask for
		{addresses, attempt{How: "raw", To: to("9.9.9.8:1500")}, true},
		{addresses, attempt{How: "raw", To: to("9.9.9.8:53")}, false},
		{addresses, attempt{How: "raw", To: to("1.2.3.4:1500")}, false},
		{addresses, attempt{How: "options", To: to("9.9.9.8:1500")}, false},
		{addresses, attempt{How: "echo", To: to("8.8.8.8:0")}, true},
		{addresses, attempt{How: "echo", To: to("8.8.8.9:0")}, false},

		{named, attempt{How: "tcp", To: to("9.9.9.9:443")}, true},
		{named, attempt{How: "udp", To: to("9.9.9.9:443")}, false},
		{named, attempt{How: "udp", To: to("9.9.9.9:8080")}, true},
		{named, attempt{How: "tcp", To: to("9.9.9.9:22")}, false},
		{named, attempt{How: "tcp", To: to("[2600::1]:443")}, true},
		{named, attempt{How: "tcp", To: to("169.254.169.254:443")}, false},
		{named, attempt{How: "tcp", To: to("10.1.2.3:443")}, false},
		{named, attempt{How: "tcp", To: to("93.184.216.1:443")}, false}, // the host
		{named, attempt{How: "tcp", To: to("[fd00:ec2::254]:443")}, false},
		{named, attempt{How: "tcp", To: to("[64:ff9b::a9fe:a9fe]:443")}, false},
		{named, attempt{How: "tcp", To: to("[2002:a9fe:a9fe::1]:443")}, false},
		{named, attempt{How: "tcp", To: to("[64:ff9b::909:909]:443")}, true},
		{named, attempt{How: "tcp", To: to("[64:ff9b::5db8:d801]:443")}, false}, // the host
		{named, attempt{How: "tcp", To: to("[2002:5db8:d801::1]:443")}, false},
		{named, attempt{How: "tcp", To: to("[::a9fe:a9fe]:443")}, false},
		{named, attempt{How: "tcp", To: to("[::ffff:0:a9fe:a9fe]:443")}, false},
		{named, attempt{How: "tcp", To: to("[2600::5efe:a9fe:a9fe]:443")}, false},
		{named, attempt{How: "tcp", To: to("[2600::200:5efe:a9fe:a9fe]:443")}, false},
		{named, attempt{How: "tcp", To: to("[2600::5efe:909:909]:443")}, true},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1::909:909]:443")}, true},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1::a9fe:a9fe]:443")}, false},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1:0:a9:fea9:fe00:0]:443")}, false},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1:a9:fe:a9fe::]:443")}, false},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1:a9fe:a9:fe00::]:443")}, false},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1:909:9:900::]:443")}, true},
		{sites, attempt{How: "tcp", To: to("[2001:0:909:909::f6f6:f6f6]:443")}, true},
		{sites, attempt{How: "tcp", To: to("[2001:0:a9fe:a9fe::f6f6:f6f6]:443")}, false},
		{sites, attempt{How: "tcp", To: to("[2001:0:909:909::5601:5601]:443")}, false},
		{sites, attempt{How: "tcp", To: to("[64:ff9b:1::]:443")}, false},
		{named, attempt{How: "send", To: to("10.9.9.9:53")}, true}, // its resolver
		{named, attempt{How: "send", To: to("10.9.9.9:54")}, false},
		{named, attempt{How: "send", To: to("8.8.8.8:53")}, false},
		{named, attempt{How: "echo", To: to("8.8.8.8:0")}, false},

		{policy.Policy{Mode: policy.Public}, attempt{How: "tcp", To: to("9.9.9.9:22")}, true},
		{policy.Policy{Mode: policy.Public}, attempt{How: "echo", To: to("9.9.9.9:0")}, true},
		{policy.Policy{Mode: policy.Public}, attempt{How: "send", To: to("10.9.9.9:53")}, true},
		{policy.Policy{Mode: policy.Public}, attempt{How: "tcp", To: to("10.9.9.9:22")}, false},
		{policy.Policy{Mode: policy.Public}, attempt{How: "tcp", To: to("100.100.100.200:80")}, false},
		{policy.Policy{Mode: policy.Public}, attempt{How: "send", To: to("93.184.216.1:22")}, false},
		{policy.Policy{Mode: policy.Public}, attempt{How: "send", To: to("[::1]:22")}, false},
		{policy.Policy{Mode: policy.Public, Allow: []string{"127.0.0.1:22"}}, attempt{How: "send", To: to("127.0.0.1:22")}, true},

		{policy.Policy{Mode: policy.NoNetwork}, attempt{How: "tcp", To: to("9.9.9.9:443")}, false},
		{policy.Policy{Mode: policy.NoNetwork}, attempt{How: "send", To: to("[2600::1]:443")}, false},
		{policy.Policy{Mode: policy.NoNetwork}, attempt{How: "send", To: to("10.9.9.9:53")}, false},
		{policy.Policy{Mode: policy.NoNetwork}, attempt{How: "raw", To: to("9.9.9.9:443")}, false},
	}
	p := imprison(t, "suspect", policy.Policy{Mode: policy.NoNetwork}, around)
	refused := uint64(0)
	for i, tt := range tests {
		if i == 0 || !tt.policy.Equal(tests[i-1].policy) {
			if err := SetPolicy(p.group.Path, regions(t, tt.policy, around)); err != nil {
				t.Fatal(err)
			}
		}
		u.saw(t)
		said := p.tries(tt.attempt)
		got := u.saw(t) > 0
		if got != tt.allowed || (said == "") != tt.allowed {
			t.Errorf("%v: %v: left: %v, the process was told %q", tt.policy, tt.attempt, got, said)
		}
		if !tt.allowed {
			refused++
		}
	}
	if r, err := RefusedBy(p.group.Path); err != nil || r.Calls+r.Packets != refused {
		t.Errorf("counted %+v (%v), refused %d", r, err, refused)
	}
}

// BenchmarkSend is a datagram of a process in a group, by the policy: each is decided about at the call and on its way out.
func BenchmarkSend(b *testing.B) {
	requireEnforcement(b)
	newUplink(b)
	long := policy.Policy{Mode: policy.Allowlist}
	for i := range 1024 {
		long.Allow = append(long.Allow, fmt.Sprintf("9.%d.%d.0/24:%d-%d", i/256, i%256, 1000+i, 2000+i))
	}
	send := attempt{How: "send", To: to("9.0.0.9:1500"), More: 1000}
	run := func(name string, p *prisoner) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if said := p.tries(send); said != "" {
					b.Fatal(said)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(send.More+1), "ns/packet")
		})
	}
	p := imprison(b, "bench", policy.Policy{Mode: policy.Public}, policy.Surroundings{})
	run("public", p)
	if err := SetPolicy(p.group.Path, regions(b, long, policy.Surroundings{})); err != nil {
		b.Fatal(err)
	}
	run("1024-entries", p)
	run("free", start(b, nil))
}

// TestMadeAhead: a process in a group without a policy reaches nothing, until somebody who has found the group gives it one. What is not
// a group, or nobody looks after, is not found.
func TestMadeAhead(t *testing.T) {
	requireEnforcement(t)
	u := newUplink(t)
	made, err := Create("ahead", unnoted)
	if err != nil {
		t.Fatal(err)
	}
	defer made.Close()
	p := start(t, made)
	allowed := attempt{How: "tcp", To: to("9.9.9.9:443")}
	if said := p.tries(allowed); said == "" || u.saw(t) != 0 {
		t.Errorf("without a policy the process was told %q", said)
	}
	if err := made.Wait(); err != nil { // for nothing
		t.Error(err)
	}
	bare := filepath.Join(filepath.Dir(made.Path), prefix+"bare")
	if err := os.Mkdir(bare, 0o700); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(bare)
	for name, path := range map[string]string{"bare": bare, "gone": filepath.Join(filepath.Dir(made.Path), prefix+"gone")} {
		if _, err := Open(path, name); !errors.Is(err, ErrNotEnforced) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Open(made.Path, "another"); err == nil {
		t.Error("a group of another name was found")
	}
	g, err := Open(made.Path, "ahead")
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	doors := []policy.Port{{Host: to("127.0.0.1:7001"), Guest: 1, Protocol: policy.UDP}}
	if err = g.Admit(regions(t, policy.Policy{Mode: policy.Public}, policy.Surroundings{}), doors); err == nil {
		err = g.Wait()
	}
	if err != nil {
		t.Fatal(err)
	}
	if said := p.tries(allowed); said != "" || u.saw(t) == 0 {
		t.Errorf("with a policy the process was told %q", said)
	}
	if err := Remove(g.Path, "ahead"); err != nil {
		t.Error(err)
	}
}

// TestRemoveLeavesNothing: a group that is removed leaves neither a directory nor a policy, also with processes in it.
func TestRemoveLeavesNothing(t *testing.T) {
	requireEnforcement(t)
	doors := []policy.Port{{Host: to("127.0.0.1:7000"), Guest: 1, Protocol: policy.UDP}}
	g := create(t, "left", policy.Policy{Mode: policy.Public}, policy.Surroundings{}, doors...)
	id, err := number(g.Path)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(g.File().Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	if _, err := Create("left", unnoted); err == nil {
		t.Error("two groups have one name")
	}
	for range 2 { // the second time there is nothing to do
		if err := Remove(g.Path, "left"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(g.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is there (%v)", g.Path, err)
	}
	for _, name := range allMaps() {
		m, err := pinned(name)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if value, err := m.LookupBytes(id); err != nil || value != nil {
			t.Errorf("%s: has an entry of the group (%v)", name, err)
		}
	}
	if err := SetPolicy(g.Path, nil); err == nil {
		t.Error("a policy was set of a group that is gone")
	}
}

// TestRemoveForgetsWhatOthersRemoved: the policy of a group that somebody else has removed goes when its VM is.
func TestRemoveForgetsWhatOthersRemoved(t *testing.T) {
	requireEnforcement(t)
	around := policy.Surroundings{}
	var groups []*Group
	for _, name := range []string{"gone", "here"} {
		groups = append(groups, create(t, name, policy.Policy{Mode: policy.Public}, around))
	}
	id, err := number(groups[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(groups[0].Path); err != nil {
		t.Fatal(err)
	}
	if err := Remove(groups[0].Path, "gone"); err != nil {
		t.Fatal(err)
	}
	policies, err := pinned(policiesMap)
	if err != nil {
		t.Fatal(err)
	}
	defer policies.Close()
	if value, err := policies.LookupBytes(id); err != nil || value != nil {
		t.Errorf("the policy of a group that is gone is there (%v)", err)
	}
	if err := SetPolicy(groups[1].Path, regions(t, policy.Policy{Mode: policy.NoNetwork}, around)); err != nil {
		t.Error("the policy of another group is gone:", err)
	}
	if err := Remove(groups[1].Path, "here"); err != nil {
		t.Error(err)
	}
}

// TestRemoveTouchesOnlyItsGroup: what a record says is not trusted.
func TestRemoveTouchesOnlyItsGroup(t *testing.T) {
	for _, path := range []string{"/sys/fs/cgroup/other", "/sys/fs/cgroup/../../../tmp/forkvm-a", "/tmp/forkvm-a", "forkvm-a", ""} {
		if err := Remove(path, "a"); err == nil {
			t.Errorf("%q was removed", path)
		}
	}
}

// TestLoadAtOnce: many who need the programs at the same time load them once, and one who died over it is in nobody's way.
func TestLoadAtOnce(t *testing.T) {
	requireEnforcement(t)
	if !testkit.InLab() {
		t.Skip("takes the programs from under this machine's own VMs: it is for the lab")
	}
	if err := os.RemoveAll(pinDir); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(pinDir, 0o700); err != nil { // of one that died
		t.Fatal(err)
	}
	const many = 8
	ids, failed := make(chan ebpf.MapID, many), make(chan error, many)
	for range many {
		go func() {
			m, err := pinned(policiesMap)
			if err != nil {
				failed <- err
				return
			}
			defer m.Close()
			info, err := m.Info()
			if err != nil {
				failed <- err
				return
			}
			id, _ := info.ID()
			ids <- id
		}()
	}
	first := ebpf.MapID(0)
	for range many {
		select {
		case err := <-failed:
			t.Fatal(err)
		case id := <-ids:
			if first == 0 {
				first = id
			}
			if id != first {
				t.Errorf("two have loaded the programs: maps %d and %d", first, id)
			}
		case <-time.After(time.Minute):
			t.Fatal("nobody has loaded the programs")
		}
	}
	for _, h := range hooks() {
		if _, err := os.Stat(filepath.Join(pinDir, h.name)); err != nil {
			t.Error(err)
		}
	}
}
