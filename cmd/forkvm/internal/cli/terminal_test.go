package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/client"
)

// openPTY returns both ends of a terminal.
func openPTY(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("needs terminals: ", err)
	}
	t.Cleanup(func() { master.Close() })
	number, err := unix.IoctlGetUint32(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	return master, slave
}

func TestCommandOnTerminal(t *testing.T) {
	master, slave := openPTY(t)
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 120}); err != nil {
		t.Fatal(err)
	}
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"exec -it alpha -- true", "shell alpha"} {
		s := newSession(t)
		s.env.Stdin = slave
		vm := s.node.vms[0]
		var during *unix.Termios
		vm.onExec = func() { during, err = unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS) }
		s.run(strings.Fields(line)...)
		if err != nil || during == nil {
			t.Fatalf("%s: %v", line, err)
		}
		got := vm.got
		if got.Terminal == nil || *got.Terminal != (client.TerminalSize{Rows: 40, Columns: 120}) || got.Stdin != slave {
			t.Errorf("%s: %+v", line, got)
		}
		if during.Lflag&(unix.ECHO|unix.ICANON|unix.ISIG) != 0 {
			t.Errorf("%s: the terminal still means something by keys", line)
		}
		after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
		if err != nil || *after != *before {
			t.Errorf("%s: the terminal is not as it was: %+v, %v", line, after, err)
		}
	}
}

func TestNoTerminal(t *testing.T) {
	s := newSession(t)
	s.env.Stdin = strings.NewReader("")
	for _, line := range []string{"exec -t alpha -- vi", "shell alpha"} {
		if _, stderr, code := s.run(strings.Fields(line)...); code == 0 || !strings.Contains(stderr, "no terminal") {
			t.Errorf("%s: exit code %d: %s", line, code, stderr)
		}
	}
}
