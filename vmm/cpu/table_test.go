package cpu

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/kvm"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var update = flag.Bool("update", false, "write the golden files")

// Tables in testdata have a line per leaf: function, index, flags, registers.
const lineFormat = "%08x %2d %x %08x %08x %08x %08x\n"

func readTable(t testing.TB, name string) cpuid {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	var c cpuid
	for line := range strings.Lines(string(data)) {
		var e kvm.CPUIDEntry
		if _, err := fmt.Sscanf(line, lineFormat, &e.Function, &e.Index, &e.Flags, &e.EAX, &e.EBX, &e.ECX, &e.EDX); err != nil {
			t.Fatalf("%s: %q: %v", name, line, err)
		}
		c = append(c, e)
	}
	return c
}

func (c cpuid) text() string {
	var b strings.Builder
	for _, e := range c {
		fmt.Fprintf(&b, lineFormat, e.Function, e.Index, e.Flags, e.EAX, e.EBX, e.ECX, e.EDX)
	}
	return b.String()
}

// golden compares with a file in testdata.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("%s is\n%s\nwant\n%s(go test -update writes it)", name, got, want)
	}
}

var hosts = []string{"intel", "amd-svm", "amd-topoext"}

func TestGuestCPUID(t *testing.T) {
	for _, host := range hosts {
		supported := readTable(t, "supported-"+host+".txt")
		before := supported.text()
		golden(t, "guest-"+host+"-0of1.txt", []byte(guestCPUID(supported, 0, 1).text()))
		golden(t, "guest-"+host+"-5of6.txt", []byte(guestCPUID(supported, 5, 6).text()))
		if supported.text() != before {
			t.Errorf("%s: the supported table changed", host)
		}
	}
}

// Every way of asking gives one package of so many cores of one thread, and
// each vCPU its own number.
func TestTopology(t *testing.T) {
	for _, host := range hosts {
		supported := readTable(t, "supported-"+host+".txt")
		for _, cpus := range []int{1, 2, 3, 4, 7, 8, 32, 255} {
			for _, id := range []int{0, cpus - 1} {
				c := guestCPUID(supported, id, cpus)
				checkTopology(t, fmt.Sprintf("%s %d of %d", host, id, cpus), c, uint32(id), uint32(cpus))
			}
		}
	}
}

func checkTopology(t *testing.T, what string, c cpuid, id, cpus uint32) {
	t.Helper()
	equal := func(where string, got, want uint32) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s is %d, want %d", what, where, got, want)
		}
	}
	equal("leaf 1 apic id", c.value(1, 0, ebx)>>24, id)
	equal("leaf 1 count", c.value(1, 0, ebx)>>16&0xff, cpus)
	equal("leaf 1 ht", c.value(1, 0, edx)>>28&1, min(cpus-1, 1))
	for _, leaf := range []uint32{0xb, 0x1f} {
		if leaf == 0x1f && c.find(leaf, 0) == nil {
			continue
		}
		equal("threads per core", c.value(leaf, 0, ebx), 1)
		equal("cores", c.value(leaf, 1, ebx), cpus)
		equal("x2apic id", c.value(leaf, 1, edx), id)
		if shift := c.value(leaf, 1, eax); uint32(1)<<shift < cpus || id>>shift != 0 {
			t.Errorf("%s: package shift %d", what, shift)
		}
		equal("end of levels", c.value(leaf, 2, ecx)>>8, 0)
	}
	if c.value(0, 0, eax) < 0xb {
		t.Errorf("%s: leaf 0xb is beyond the highest leaf", what)
	}
	if c.isAMD() {
		equal("amd cores", c.value(0x80000008, 0, ecx)&0xff, cpus-1)
		if c.find(0x8000001e, 0) != nil {
			equal("extended apic id", c.value(0x8000001e, 0, eax), id)
			equal("threads per core", c.value(0x8000001e, 0, ebx)>>8&0xff, 0)
		}
	} else if last := c.value(4, 3, eax) >> 14 & 0xfff; last+1 < cpus {
		t.Errorf("%s: last-level cache is shared by %d", what, last+1)
	}
}

func TestMandatoryBits(t *testing.T) {
	for _, host := range hosts {
		c := guestCPUID(readTable(t, "supported-"+host+".txt"), 0, 2)
		if bits := uint32(featureHypervisor | featureTSCDeadline); c.value(1, 0, ecx)&bits != bits {
			t.Errorf("%s: leaf 1 ecx %#x", host, c.value(1, 0, ecx))
		}
		const clocks = 1<<kvm.ParaFeatureClocksource2 | 1<<kvm.ParaFeatureClocksourceStableBit
		if c.value(kvm.ParaCPUIDFeatures, 0, eax)&clocks != clocks {
			t.Errorf("%s: no kvmclock", host)
		}
		if c.nests() {
			t.Errorf("%s: guest may have guests", host)
		}
		if c.value(0xa, 0, eax) != 0 {
			t.Errorf("%s: guest has performance counters", host)
		}
	}
}

func TestCompare(t *testing.T) {
	intel, amd := readTable(t, "supported-intel.txt"), readTable(t, "supported-amd-svm.txt")
	change := func(function, index uint32, r register, clear, set uint32) cpuid {
		c := append(cpuid(nil), intel...)
		e := c.find(function, index)
		*r.of(e) = *r.of(e)&^clear | set
		return c
	}
	for _, tc := range []struct {
		name string
		host cpuid
		want string // "" for compatible
	}{
		{"same host", intel, ""},
		{"more features", change(7, 0, edx, 0, 1<<24), ""},
		{"other model", change(1, 0, eax, 0xff, 0x71), ""},
		{"no avx512", change(7, 0, ebx, 1<<16|1<<17, 0), "host cpu lacks avx512f, avx512dq"},
		{"several words", change(1, 0, ecx, 1<<25|1<<0, 0), "host cpu lacks pni, aes"},
		{"no x2apic", change(1, 0, ecx, 1<<21, 0), "host cpu lacks x2apic"},
		{"a bit without a name", change(7, 1, eax, 1<<4, 0), "host cpu lacks avx_vnni"},
		{"no kvmclock", change(kvm.ParaCPUIDFeatures, 0, eax, 1<<3, 0), "host cpu lacks kvmclock"},
		{"smaller addresses", change(0x80000008, 0, eax, 0xff, 0x27), "physical addresses have 52 bits, host has 39"},
		{"fewer components", change(0xd, 0, eax, 1<<9, 0), "extended state has components 0x200 that the host lacks"},
		{"other layout", change(0xd, 9, ebx, 0xfff, 0x980), "extended state component 9 is laid out otherwise on the host"},
	} {
		err := compare(guestCPUID(intel, 1, 4), tc.host)
		if got := fmt.Sprint(err); got != tc.want && (tc.want != "" || err != nil) {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
	err := compare(guestCPUID(intel, 0, 1), amd)
	if err == nil || !strings.Contains(err.Error(), `cpu vendor is "GenuineIntel", host has "AuthenticAMD"`) ||
		!strings.Contains(err.Error(), "avx512f") {
		t.Errorf("intel to amd: %v", err)
	}
	if err := compare(nil, intel); err == nil {
		t.Error("an empty table is compatible")
	}
}

func TestWantedMSRs(t *testing.T) {
	indices := []uint32{0x174, msrTSCDeadline, msrTSC, 0x3b, 0x480, 0x40000000, kvm.MSRKVMWallClockNew, kvm.MSRKVMSystemTime,
		kvm.MSRKVMSystemTimeNew, 0x186, 0x174}
	got := wantedMSRs(indices, readTable(t, "guest-intel-0of1.txt"))
	if len(got) < 4 || got[len(got)-2] != msrTSC || got[len(got)-1] != msrTSCDeadline {
		t.Errorf("order %#x", got)
	}
	seen := map[uint32]bool{}
	for _, index := range got {
		if seen[index] {
			t.Errorf("%#x twice", index)
		}
		seen[index] = true
	}
	for index, want := range map[uint32]bool{
		0x174: true, 0x3b: true, kvm.MSRKVMSystemTimeNew: true, msrMTRRDefType: true, 0x20f: true,
		0x480: false, 0x40000000: false, kvm.MSRKVMWallClockNew: false, kvm.MSRKVMSystemTime: false, 0x186: false,
	} {
		if seen[index] != want {
			t.Errorf("%#x saved: %v, want %v", index, seen[index], want)
		}
	}
	nesting := append(cpuid(nil), readTable(t, "supported-intel.txt")...)
	nesting.find(1, 0).ECX |= 1 << 5
	if list := wantedMSRs(indices, nesting); list[len(list)-1] != msrTSCDeadline || !slices.Contains(list, 0x480) {
		t.Errorf("nesting guest: %#x", list)
	}
}
