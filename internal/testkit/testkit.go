// Package testkit is what tests of several packages share: what they require of the machine, checks for leaked
// descriptors and goroutines, and the way to files that the lab was given.
//
// A test that needs something of the machine says so with a Require function. Where that is missing the test is skipped
// with a text that says how to get it. The environment variable REQUIRE, a list such as "kvm,tap" or "all", turns the
// skips of what it names into failures: a run that was meant to cover something cannot pass by not running it.
package testkit

import (
	"os"
	"strings"
	"testing"
)

// EnvRequire names what must not be skipped, separated by commas.
const EnvRequire = "REQUIRE"

// EnvKVM says what this machine's /dev/kvm can run. The lab sets it to "linux"; so may a user who knows that it does.
const EnvKVM = "FORKVM_KVM"

// RequireKVM skips the test unless /dev/kvm is there and runs unmodified Linux guests. Whether one does cannot be seen
// from the device, so the test is told: in the lab it does, elsewhere FORKVM_KVM=linux says so.
func RequireKVM(t testing.TB) {
	t.Helper()
	if os.Getenv(EnvKVM) != "linux" {
		missing(t, "kvm", "needs KVM that runs Linux: run it in the lab (make test, or: lab test ./path/of/package), "+
			"or, where 'forkvm doctor' finds /dev/kvm usable, with FORKVM_KVM=linux")
		return
	}
	file, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		missing(t, "kvm", "needs /dev/kvm, which FORKVM_KVM=linux says is there: "+err.Error())
		return
	}
	file.Close()
}

// RequireRoot skips the test unless it runs as root.
func RequireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root", "needs root: run it in the lab, or as root")
	}
}

// RequireFile skips the test unless path exists, and returns it. Fix says how to get it.
func RequireFile(t testing.TB, path, fix string) string {
	t.Helper()
	if _, err := os.Stat(path); err != nil {
		missing(t, "files", "needs "+path+": "+fix)
	}
	return path
}

// Require skips the test, or fails it when REQUIRE names what, because something is missing. It does not return.
func Require(t testing.TB, what, fix string) {
	t.Helper()
	missing(t, what, fix)
}

// Long skips a test of several minutes in a short run, which 'make test' makes of the tests in the lab; 'make test-long' runs
// all of them.
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes minutes in the lab: make test-long")
	}
}

// EnvCounted is set to 1 in a lab whose clock counts instructions.
const EnvCounted = "LAB_ICOUNT"

// RequireCounted skips a test that measures work by the clock, unless the clock counts work instead of time: in the lab, as
// 'make test-lab' runs it. The test calls RequireKVM too, by which the lab finds it.
func RequireCounted(t testing.TB) {
	t.Helper()
	if !Counted() {
		missing(t, "counted", "needs the lab in counted time: make test-lab, or LAB_ICOUNT=1 lab test")
	}
}

// Counted says whether the clock counts work instead of time.
func Counted() bool { return InLab() && os.Getenv(EnvCounted) == "1" }

// InLab says whether this process runs in the lab machine.
func InLab() bool { return os.Getenv("FORKVM_LAB") == "1" }

func missing(t testing.TB, what, fix string) {
	t.Helper()
	if required(os.Getenv(EnvRequire), what) {
		t.Fatalf("%s is required (REQUIRE=%s): %s", what, os.Getenv(EnvRequire), fix)
	}
	t.Skip(fix)
}

// required says whether the list names what.
func required(list, what string) bool {
	for _, name := range strings.Split(list, ",") {
		if name = strings.TrimSpace(name); name == what || name == "all" {
			return true
		}
	}
	return false
}
