package initramfs

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// StateDir is the guest agent's directory, on a tmpfs in every mode.
const StateDir = "/run/forkvm"

// agentPath is the copy of this program that outlives the initramfs.
const agentPath = StateDir + "/forkvm-agent"

// Early mounts what everything else needs and makes messages visible. It comes
// before Load and is called by PID 1 only, like everything that follows.
func Early() error {
	if err := mountAll(early); err != nil {
		return err
	}
	// The kernel opened /dev/console from the initramfs, if that had one.
	console, err := unix.Open("/dev/console", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil // a machine without a console boots as well
	}
	for fd := range 3 {
		if err := unix.Dup3(console, fd, 0); err != nil {
			return fmt.Errorf("redirect to console: %w", err)
		}
	}
	return unix.Close(console)
}

// Boot loads modules and mounts the root file system according to c. When it
// returns nil, / is what it is going to be.
func Boot(c Config, log func(string)) error {
	failed := loadModules(c.Modules, log)
	if err := cgroup.mount(); err != nil {
		log(err.Error())
	}
	if c.Hostname != "" {
		if err := unix.Sethostname([]byte(c.Hostname)); err != nil {
			log("set hostname: " + err.Error())
		}
	}
	if c.Root == "" {
		return nil
	}
	if err := mountRoot(c, failed); err != nil {
		return err
	}
	if c.Mode == ModeHandover {
		if err := copySelf(agentPath); err != nil {
			return fmt.Errorf("copy the guest agent to %s: %w", agentPath, err)
		}
	}
	return switchRoot()
}

// copySelf copies the running program to a file system that stays.
func copySelf(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	src, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(dst, src); err != nil {
		dst.Close()
		return err
	}
	return dst.Close()
}

// Handover starts the guest agent as a process of its own and becomes the
// distribution's init. It returns only on failure.
func Handover(c Config) error {
	if _, err := os.Stat(c.Init); err != nil {
		return fmt.Errorf("hand over: the root file system has no %s (mode %s does without)", c.Init, ModePID1)
	}
	if err := startAgent(); err != nil {
		return fmt.Errorf("start the guest agent: %w", err)
	}
	argv := append([]string{c.Init}, os.Args[1:]...)
	err := syscall.Exec(c.Init, argv, os.Environ())
	return fmt.Errorf("execute %s: %w", c.Init, err)
}

// startAgent starts the agent that lives beside the distribution's init. The @
// in front of its name asks the service manager's final killing spree to spare
// it: https://systemd.io/ROOT_STORAGE_DAEMONS.
func startAgent() error {
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	// Messages go to the kernel's log, which outlives every console and ends
	// up in the journal.
	out := null
	if kmsg, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0); err == nil {
		defer kmsg.Close()
		out = kmsg
	}
	_, err = syscall.ForkExec(agentPath, []string{"@forkvm-agent", "serve", "--guest"}, &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Files: []uintptr{null.Fd(), out.Fd(), out.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	return err
}

// Settle does for ModePID1 what a distribution's init would do first.
func Settle(c Config, log func(string)) {
	if err := mountAll(late); err != nil {
		log(err.Error())
	}
	links()
	if err := loopback(); err != nil {
		log("bring up lo: " + err.Error())
	}
	if name, err := os.ReadFile("/etc/hostname"); err == nil && c.Hostname == "" {
		if name = bytes.TrimSpace(name); len(name) > 0 && len(name) <= 64 {
			unix.Sethostname(name)
		}
	}
	// Commands inherit it. The kernel's own default is too low for servers.
	limit := syscall.Rlimit{Cur: 65536, Max: 524288}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		log("raise file limit: " + err.Error())
	}
	// Ctrl-Alt-Del is a signal to PID 1, not a reset.
	unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF)
}
