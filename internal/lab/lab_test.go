package lab_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/lab"
	"github.com/forkvm/forkvm/internal/testkit"
)

// requireLab skips the test where no lab can be booted: without the emulator, or inside the lab.
func requireLab(t *testing.T) {
	t.Helper()
	if testkit.InLab() {
		t.Skip("boots a lab: run it outside of one")
	}
	if testing.Short() {
		t.Skip("boots a lab: run it without -short")
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		testkit.Require(t, "lab", "needs QEMU: make deps")
	}
}

// run runs a shell command to its end within a minute.
func run(t *testing.T, m *lab.Machine, c lab.Command) (lab.Outcome, string, string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	outcome, err := m.Run(ctx, c)
	if err != nil {
		t.Fatalf("run %q: %v", c.Argv, err)
	}
	return outcome, stdout.String(), stderr.String()
}

// One machine serves all of these, in order; the last one ends it.
func TestMachine(t *testing.T) {
	requireLab(t)
	testkit.NoLeaks(t)
	inputs := t.TempDir()
	for name, text := range map[string]string{"tree/sub/file": "from a tree", "single": "from a file"} {
		path := filepath.Join(inputs, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := lab.Start(t.Context(), lab.Config{
		MemoryMiB: 2048,
		In:        []string{filepath.Join(inputs, "tree"), filepath.Join(inputs, "single")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	t.Logf("up in %.1f s", m.Up().Seconds())

	t.Run("streams and exit status are apart", func(t *testing.T) {
		outcome, stdout, stderr := run(t, m, lab.Shell("echo out; echo err >&2; exit 7"))
		if outcome.Code != 7 || stdout != "out\n" || stderr != "err\n" {
			t.Errorf("code %d, stdout %q, stderr %q", outcome.Code, stdout, stderr)
		}
	})
	t.Run("signal", func(t *testing.T) {
		if outcome, _, _ := run(t, m, lab.Shell("kill -TERM $$")); outcome.Signal != 15 || outcome.Code != 143 {
			t.Errorf("ended with %+v, want signal 15 and code 143", outcome)
		}
	})
	t.Run("input and environment", func(t *testing.T) {
		c := lab.Shell("tr a-z A-Z; echo $COLOR; pwd")
		c.Stdin, c.Env, c.Dir = strings.NewReader("through\n"), []string{"COLOR=blue"}, "/tmp"
		if _, stdout, _ := run(t, m, c); stdout != "THROUGH\nblue\n/tmp\n" {
			t.Errorf("printed %q", stdout)
		}
	})
	t.Run("no input", func(t *testing.T) {
		if outcome, stdout, _ := run(t, m, lab.Shell("cat")); outcome.Code != 0 || stdout != "" {
			t.Errorf("code %d, printed %q; want the end of file at once", outcome.Code, stdout)
		}
	})
	t.Run("much output is complete and in order", func(t *testing.T) {
		_, stdout, _ := run(t, m, lab.Shell("seq 1 200000"))
		if lines := strings.Split(stdout, "\n"); len(lines) != 200001 || lines[199999] != "200000" || lines[99999] != "100000" {
			t.Errorf("%d lines", len(lines))
		}
	})
	t.Run("kvm and surroundings", func(t *testing.T) {
		outcome, stdout, stderr := run(t, m, lab.Shell(
			"set -e; test -c /dev/kvm; test -c /dev/net/tun; test -e /sys/fs/cgroup/cgroup.procs; test -c /dev/ptmx; "+
				"grep -qw svm /proc/cpuinfo; mke2fs -V 2>/dev/null; ip link show lo | grep -q UP; test -w /var/lib/forkvm; "+
				"modprobe vsock_loopback; unshare -m true; cat /sys/module/kvm_amd/parameters/npt"))
		if outcome.Code != 0 || stdout != "Y\n" {
			t.Errorf("code %d, stdout %q, stderr %q", outcome.Code, stdout, stderr)
		}
	})
	t.Run("inputs are copies that can be changed", func(t *testing.T) {
		_, stdout, stderr := run(t, m, lab.Shell("ls /in /in/tree; cat /in/tree/sub/file /in/single; echo changed > /in/tree/sub/file; echo more >> /in/single"))
		if want := "/in:\nsingle\ntree\n\n/in/tree:\nsub\nfrom a treefrom a file"; stdout != want || stderr != "" {
			t.Errorf("printed %q and %q, want %q", stdout, stderr, want)
		}
		if got, err := os.ReadFile(filepath.Join(inputs, "tree/sub/file")); err != nil || string(got) != "from a tree" {
			t.Errorf("the original holds %q, %v", got, err)
		}
	})
	t.Run("out comes back", func(t *testing.T) {
		run(t, m, lab.Shell("mkdir -p /out/dir; echo result > /out/dir/file; ln -s dir/file /out/link; chmod 755 /out/dir/file"))
		to := filepath.Join(t.TempDir(), "out")
		if n, err := m.Collect(t.Context(), "/out", to); err != nil || n != 3 {
			t.Errorf("collected %d entries, %v; want 3", n, err)
		}
		if got, err := os.ReadFile(filepath.Join(to, "link")); err != nil || string(got) != "result\n" {
			t.Errorf("file behind the link holds %q, %v", got, err)
		}
		if _, err := m.Collect(t.Context(), "/absent", to); err == nil {
			t.Error("collected what does not exist")
		}
	})
	t.Run("processes left behind are reported", func(t *testing.T) {
		c := lab.Shell("setsid sleep 1234 >/dev/null 2>&1 & while ! pidof sleep >/dev/null; do :; done")
		c.KillLeft = true
		outcome, _, _ := run(t, m, c)
		if len(outcome.Left) != 1 || !strings.HasSuffix(outcome.Left[0], " sleep 1234") {
			t.Errorf("left %q, want the sleep", outcome.Left)
		}
		if outcome, _, _ := run(t, m, lab.Shell("sleep 0.2; pidof sleep")); outcome.Code == 0 {
			t.Error("the process lives on")
		}
	})
	t.Run("what cannot be started", func(t *testing.T) {
		if _, err := m.Run(t.Context(), lab.Command{Argv: []string{"/absent"}}); err == nil || !strings.Contains(err.Error(), "no such file") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a command out of time is killed and the machine goes on", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := m.Run(ctx, lab.Shell("sleep 1000 & sleep 1000"))
		var stopped *lab.StoppedError
		if !errors.As(err, &stopped) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want one that says its time ran out", err)
		}
		if _, stdout, _ := run(t, m, lab.Shell("pidof sleep; echo alive")); stdout != "alive\n" {
			t.Errorf("afterwards: %q", stdout)
		}
	})
	t.Run("a kernel panic is told as one", func(t *testing.T) {
		_, err := m.Run(t.Context(), lab.Shell("echo c > /proc/sysrq-trigger; sleep 100"))
		var death *lab.DeathError
		if !errors.As(err, &death) || death.Reason != lab.Panic {
			t.Fatalf("error %v, want a kernel panic", err)
		}
		if text := strings.Join(death.Console, "\n"); !strings.Contains(text, "sysrq triggered crash") {
			t.Errorf("the console's last lines do not say why:\n%s", text)
		}
	})
	if err := m.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Errorf("close again: %v", err)
	}
}

func TestStartRefuses(t *testing.T) {
	requireLab(t)
	for _, test := range []struct {
		name   string
		config lab.Config
		want   string
	}{
		{"input that does not exist", lab.Config{In: []string{"/nonexistent/input"}}, "/nonexistent/input"},
		{"kernel that does not exist", lab.Config{Kernel: "/nonexistent/kernel.deb"}, "kernel"},
		{"kernel that is none", lab.Config{Kernel: t.TempDir()}, "vmlinuz"},
		{"tool that does not exist", lab.Config{Tools: []string{"no-such-tool"}}, "no-such-tool"},
	} {
		if m, err := lab.Start(t.Context(), test.config); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
			if m != nil {
				m.Close()
			}
		}
	}
}

func TestStartGivesUp(t *testing.T) {
	requireLab(t)
	testkit.NoLeaks(t)
	_, err := lab.Start(t.Context(), lab.Config{BootTimeout: 200 * time.Millisecond})
	var death *lab.DeathError
	if !errors.As(err, &death) || death.Reason != lab.TimedOut || death.Doing != "boot" {
		t.Errorf("error %v, want a boot that timed out", err)
	}
}
