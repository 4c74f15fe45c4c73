package doctor

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/forkvm/forkvm/kvm"
)

func TestReportIsUsableWithoutFailures(t *testing.T) {
	c := Check{Name: "x"}
	for want, checks := range map[bool][]Check{
		true:  {c.ok(""), c.warning("", "")},
		false: {c.ok(""), c.failed("", "do it")},
	} {
		r := Report{Usable: true}
		if r.add(checks...); r.Usable != want {
			t.Errorf("%v: usable %v", checks, r.Usable)
		}
	}
}

func TestKVMErrorsHaveAFix(t *testing.T) {
	for _, err := range []error{
		&kvm.DeviceError{Path: "/dev/kvm", Fix: "load the module", Err: syscall.ENOENT},
		&kvm.DeviceError{Path: "/dev/kvm", Fix: "join the group", Err: syscall.EACCES},
		&kvm.MissingError{APIVersion: 12, Capabilities: []kvm.Capability{1}},
		errors.New("odd"),
	} {
		if c := (Check{Name: "kvm"}).fromOpen(err); c.Status != Failed || c.Fix == "" || c.Detail == "" {
			t.Errorf("%v: %+v", err, c)
		}
	}
}

func TestMemInfo(t *testing.T) {
	total, available := memInfo("MemTotal:        8000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n")
	if total != 8000<<10 || available != 500<<10 {
		t.Errorf("got %d, %d", total, available)
	}
}

// TestRun looks at this machine: whatever it finds, every check answers.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	r := Run(t.Context(), Config{DataDir: dir, RunDir: filepath.Join(dir, "run"), OpenNode: func() error { return nil }})
	var names []string
	for _, c := range r.Checks {
		names = append(names, c.Name)
		if c.Status == "" || c.Detail == "" {
			t.Errorf("no answer: %+v", c)
		}
		if c.Status == Failed && c.Fix == "" {
			t.Errorf("failed without a fix: %+v", c)
		}
	}
	if got := strings.Join(names, " "); got != "kvm kernel memory directories disk_space file_system huge_pages network_enforcement network_tap" {
		t.Errorf("checks: %s", got)
	}
}

func TestBadDirectories(t *testing.T) {
	c := checkDirectories(Config{OpenNode: func() error { return fmt.Errorf("path is too long") }})
	if c.Status != Failed || !strings.Contains(c.Detail, "too long") {
		t.Errorf("got %+v", c)
	}
	if c := checkFiles("/proc"); c.Status != Failed {
		t.Errorf("/proc holds no files: %+v", c)
	}
}
