package agent

import (
	"fmt"
	"os"
	"syscall"

	"github.com/forkvm/forkvm/agent/proto"
)

// Signals that systemd as PID 1 takes as orders (systemd(1)); SIGRTMIN is 34
// in the C library that it was built with.
const (
	systemdPowerOff = syscall.Signal(34 + 4)
	systemdReboot   = syscall.Signal(34 + 5)
)

// AskInit is Config.Shutdown for a guest whose PID 1 is the distribution's: it
// tells that to end the guest.
func AskInit(action string) (string, error) {
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		s := systemdPowerOff
		if action == proto.ShutdownReboot {
			s = systemdReboot
		}
		if err := syscall.Kill(1, s); err != nil {
			return "", fmt.Errorf("signal systemd: %w", err)
		}
		return "systemd", nil
	}
	// Any other init comes with these two programs. They are not waited for:
	// the guest is about to end.
	path := "/sbin/" + action
	_, err := syscall.ForkExec(path, []string{action}, &syscall.ProcAttr{
		Dir: "/", Env: []string{"PATH=" + defaultPath}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return "", fmt.Errorf("run %s: %w", path, err)
	}
	return path, nil
}
