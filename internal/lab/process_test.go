package lab

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// envOwner makes the test binary the owner of an emulator that only sleeps.
const envOwner = "LAB_TEST_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(envOwner) != "" {
		p, err := startProcess("/bin/sleep", []string{"300"}, nil, nil)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(p.cmd.Process.Pid)
		time.Sleep(5 * time.Minute)
	}
	os.Exit(m.Run())
}

func TestEmulatorDiesWithItsOwner(t *testing.T) {
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), envOwner+"=1")
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	pid, err2 := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || err2 != nil {
		t.Fatalf("owner said %q: %v", line, errors.Join(err, err2))
	}
	if err := unix.Kill(pid, 0); err != nil {
		t.Fatalf("emulator is not running: %v", err)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait() // killed, as it should be
	for deadline := time.Now().Add(10 * time.Second); ended(pid) == false; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			_ = unix.Kill(pid, unix.SIGKILL)
			t.Fatal("emulator outlives its killed owner")
		}
	}
}

// ended says that a process is gone, or a zombie that nobody has reaped.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "Z")
}

func TestStopTellsItsOwnKillFromOthers(t *testing.T) {
	for _, test := range []struct {
		name string
		end  func(*process)
		want bool
	}{
		{"stop", func(p *process) { p.stop() }, false},
		{"another's kill", func(p *process) { _ = unix.Kill(p.cmd.Process.Pid, unix.SIGKILL); <-p.done }, true},
	} {
		p, err := startProcess("/bin/sleep", []string{"300"}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		test.end(p)
		if got := p.killed(); got != test.want {
			t.Errorf("%s: killed by others: %v, want %v", test.name, got, test.want)
		}
	}
	if _, err := startProcess("/nonexistent/emulator", nil, nil, nil); err == nil {
		t.Error("no error for a program that does not exist")
	}
}
