package initramfs

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// EndProcesses asks every process but PID 1 to end, waits, and kills those that
// are left.
func EndProcesses(grace time.Duration) {
	unix.Kill(-1, unix.SIGTERM)
	unix.Kill(-1, unix.SIGCONT) // a stopped process does not hear
	if waitAlone(grace) {
		return
	}
	unix.Kill(-1, unix.SIGKILL)
	waitAlone(2 * time.Second)
}

// waitAlone waits until no signal can reach anybody else any more. Who reaps is
// not its business.
func waitAlone(limit time.Duration) bool {
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if unix.Kill(-1, 0) == syscall.ESRCH {
			return true
		}
	}
	return false
}

// Halt writes everything to the disks and ends the machine. It returns only on
// failure.
func Halt(reboot bool) error {
	unix.Sync()
	unmountAll()
	unix.Sync()
	if reboot {
		return unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}
	return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// unmountAll unmounts in reverse order and makes what stays, the root at
// least, read-only.
func unmountAll() {
	b, _ := os.ReadFile("/proc/self/mounts")
	points := mountPoints(b)
	for _, p := range slices.Backward(points) {
		if p != "/" && p != "/proc" && p != "/dev" {
			unix.Unmount(p, 0)
		}
	}
	unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

// mountPoints reads the second column of /proc/self/mounts, in which space,
// tab, newline and backslash are octal escapes.
func mountPoints(b []byte) []string {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var list []string
	for line := range bytes.Lines(b) {
		if f := strings.Fields(string(line)); len(f) > 1 {
			list = append(list, unescape.Replace(f[1]))
		}
	}
	return list
}
