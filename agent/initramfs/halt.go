package initramfs

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

// waitAlone waits until no other program runs. Who reaps is not its business.
func waitAlone(limit time.Duration) bool {
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if alone("/proc") {
			return true
		}
	}
	return false
}

// alone says whether PID 1 is the only process that runs a program. Kernel
// threads, which a signal to everybody also counts, and zombies run none.
func alone(proc string) bool {
	for _, name := range names(proc) {
		if name[0] < '1' || name[0] > '9' || name == "1" {
			continue
		}
		if _, err := os.Readlink(filepath.Join(proc, name, "exe")); err == nil {
			return false
		}
	}
	return true
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
