package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestGoName(t *testing.T) {
	for _, tc := range []struct{ prefix, c, want string }{
		{"", "guest_phys_addr", "GuestPhysAddr"},
		{"Cap", "SPLIT_IRQCHIP", "CapSplitIRQChip"},
		{"ioctl", "GET_VCPU_MMAP_SIZE", "ioctlGetVCPUMmapSize"},
		{"", "rflags", "RFLAGS"},
		{"", "r15", "R15"},
	} {
		if got := goName(tc.prefix, tc.c); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.c, got, tc.want)
		}
	}
}

var (
	constLine  = regexp.MustCompile(`^\t\w+ .*= 0x[0-9a-f]+ // `)
	spaces     = regexp.MustCompile(` +`)
	headerFile = "/usr/include/linux/kvm.h"
)

// What is committed is what the headers say. Newer headers have more, never
// other numbers.
func TestCommittedNumbers(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler: apt-get install gcc")
	}
	if _, err := os.Stat(headerFile); err != nil {
		t.Skip("needs the kernel headers: apt-get install linux-libc-dev")
	}
	out := filepath.Join(t.TempDir(), "out.go")
	if err := run("cc", out); err != nil {
		t.Fatal(err)
	}
	fresh := map[string]bool{}
	for _, line := range lines(t, out) {
		fresh[spaces.ReplaceAllString(line, " ")] = true
	}
	n := 0
	for _, line := range lines(t, "../../zabi_amd64.go") {
		if !constLine.MatchString(line) {
			continue
		}
		n++
		if !fresh[spaces.ReplaceAllString(line, " ")] {
			t.Errorf("not what the headers say: %s", strings.TrimSpace(line))
		}
	}
	if n < 100 {
		t.Errorf("only %d constants compared", n)
	}
}

func lines(t *testing.T, path string) []string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(data), "\n")
}
