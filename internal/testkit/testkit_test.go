package testkit

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// recorder stands in for a test that a Require function skips or fails.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()                        {}
func (r *recorder) Skip(args ...any)               { r.skipped = args[0].(string) }
func (r *recorder) Fatalf(format string, _ ...any) { r.failed = format }

func TestRequireSkipsWithTheFix(t *testing.T) {
	t.Setenv(EnvRequire, "")
	r := &recorder{}
	Require(r, "tap", "needs a TAP device: run it as root")
	if r.skipped != "needs a TAP device: run it as root" || r.failed != "" {
		t.Errorf("skipped %q, failed %q; want the fix as the reason of a skip", r.skipped, r.failed)
	}
}

func TestRequireFailsWhenAskedTo(t *testing.T) {
	for _, test := range []struct {
		list string
		fail bool
	}{
		{"tap", true}, {"kvm,tap", true}, {"kvm, tap", true}, {"all", true}, {"kvm", false}, {"", false}, {"tapestry", false},
	} {
		t.Setenv(EnvRequire, test.list)
		r := &recorder{}
		Require(r, "tap", "fix")
		if failed := r.failed != ""; failed != test.fail {
			t.Errorf("REQUIRE=%q: failed %v, want %v", test.list, failed, test.fail)
		}
	}
}

func TestRequireKVMNamesTheLab(t *testing.T) {
	t.Setenv(EnvRequire, "")
	t.Setenv(EnvKVM, "")
	r := &recorder{}
	RequireKVM(r)
	if !strings.Contains(r.skipped, "lab") {
		t.Errorf("skip text %q does not say how to get KVM", r.skipped)
	}
}

// The promise that RequireKVM makes: the device answers, and its processors have hardware virtualisation with nested
// paging, as unmodified guests need.
func TestLabHasKVM(t *testing.T) {
	RequireKVM(t)
	file, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	const kvmGetAPIVersion = 0xae00
	version, err := unix.IoctlRetInt(int(file.Fd()), kvmGetAPIVersion)
	if err != nil || version != 12 {
		t.Errorf("KVM API version %d, %v; want 12", version, err)
	}
	if !InLab() {
		return
	}
	if npt, err := os.ReadFile("/sys/module/kvm_amd/parameters/npt"); err != nil || strings.TrimSpace(string(npt)) != "Y" {
		t.Errorf("nested paging of kvm-amd: %q, %v; want Y", npt, err)
	}
}

func TestSettleSeesLeaks(t *testing.T) {
	before := takeInventory()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	hold := make(chan struct{})
	go func() { <-hold }()
	kinds := make(map[string]int)
	for _, leak := range before.added(takeInventory()) {
		kind, _, _ := strings.Cut(leak, " ")
		kinds[kind]++
	}
	if kinds["descriptor"] != 2 || kinds["goroutine"] != 1 || len(kinds) != 2 {
		t.Errorf("leaks reported: %v, want two descriptors and one goroutine", kinds)
	}
	r.Close()
	w.Close()
	close(hold)
	if leaks := settle(before); len(leaks) > 0 {
		t.Errorf("still reported after closing: %v", leaks)
	}
}

func TestNoLeaksLetsGoroutinesEnd(t *testing.T) {
	NoLeaks(t)
	go time.Sleep(50 * time.Millisecond)
}
