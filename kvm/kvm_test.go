package kvm

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// open returns the device, or skips the test. The tests of this package run on
// any /dev/kvm; in the lab they must run.
func open(t testing.TB) *System {
	t.Helper()
	if testkit.InLab() {
		testkit.RequireKVM(t)
	}
	s, err := Open()
	if err != nil {
		testkit.Require(t, "kvm", err.Error())
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func newVM(t testing.TB) *VM {
	t.Helper()
	vm, err := open(t).CreateVM()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	})
	return vm
}

// memory maps n bytes that live until the test and its VM are over.
func memory(t testing.TB, n int) []byte {
	t.Helper()
	p, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(p) })
	return p
}

func TestOpenFile(t *testing.T) {
	open(t)
	f, err := os.OpenFile(devicePath, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s, err := OpenFile(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	if _, err := s.CreateVM(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("create vm after close: %v", err)
	}
	again, err := OpenFile(f)
	if err != nil {
		t.Fatalf("the file did not stay open: %v", err)
	}
	again.Close()
}

func TestOpenFileOfSomethingElse(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := OpenFile(f); !errors.Is(err, unix.ENOTTY) {
		t.Errorf("got %v, want ENOTTY", err)
	}
}

func TestErrorTexts(t *testing.T) {
	for _, tc := range []struct {
		err  error
		is   error
		text string
	}{
		{deviceError("/dev/kvm", unix.ENOENT), fs.ErrNotExist, "load the module"},
		{deviceError("/dev/kvm", unix.ENODEV), unix.ENODEV, "load the module"},
		{deviceError("/dev/kvm", unix.EACCES), fs.ErrPermission, "add this user to the group"},
		{deviceError("/dev/kvm", unix.EBUSY), unix.EBUSY, "stop the other hypervisor"},
		{&MissingError{APIVersion: 11, Capabilities: []Capability{CapIRQFD, CapXCRS, 9999}}, ErrNotSupported,
			"kvm lacks API version 12 (has 11), KVM_CAP_IRQFD, KVM_CAP_XCRS, KVM_CAP(9999): a newer host kernel is needed"},
		{&MSRError{Write: true, VCPU: 2, Index: 0x10, Value: 7}, nil, "set msr 0x10 (vcpu 2): value 0x7 refused"},
	} {
		if tc.is != nil && !errors.Is(tc.err, tc.is) {
			t.Errorf("%v is not %v", tc.err, tc.is)
		}
		if !strings.Contains(tc.err.Error(), tc.text) {
			t.Errorf("%q does not say %q", tc.err, tc.text)
		}
	}
}

func TestSystemLists(t *testing.T) {
	s := open(t)
	cpuid, err := s.SupportedCPUID()
	if err != nil || len(cpuid) < 5 {
		t.Fatalf("supported cpuid: %d entries, %v", len(cpuid), err)
	}
	found := false
	for _, e := range cpuid {
		found = found || e.Function == ParaCPUIDSignature && e.EBX == 0x4b4d564b // "KVMK"
	}
	if !found {
		t.Error("supported cpuid has no KVM signature")
	}
	indices, err := s.MSRIndexList()
	if err != nil || len(indices) < 10 {
		t.Errorf("msr index list: %d, %v", len(indices), err)
	}
	features, err := s.MSRFeatureIndexList()
	if err != nil && !errors.Is(err, ErrNotSupported) {
		t.Error(err)
	}
	t.Log(len(cpuid), "cpuid entries,", len(indices), "msrs,", len(features), "feature msrs")
}
