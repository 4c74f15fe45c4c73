package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// prepare brings the machine to the state that every command finds: kernel file systems, modules, loopback network.
func prepare() error {
	for _, dir := range []string{"/root", "/home/dev", "/in", "/out", "/var/lib", "/usr/local/bin"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for _, m := range []struct{ source, target, kind, data string }{
		{"proc", "/proc", "proc", ""},
		{"sysfs", "/sys", "sysfs", ""},
		{"devtmpfs", "/dev", "devtmpfs", "mode=0755"},
		{"devpts", "/dev/pts", "devpts", "mode=0620,ptmxmode=0666,gid=5"},
		{"shm", "/dev/shm", "tmpfs", "mode=1777,size=90%"},
		{"run", "/run", "tmpfs", "mode=0755"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", "nsdelegate"},
		{"bpf", "/sys/fs/bpf", "bpf", "mode=0700"},
		{"tracefs", "/sys/kernel/tracing", "tracefs", ""},
		{"debugfs", "/sys/kernel/debug", "debugfs", ""},
	} {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return fmt.Errorf("create %s: %w", m.target, err)
		}
		if err := unix.Mount(m.source, m.target, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2",
		"/etc/mtab": "/proc/self/mounts",
	} {
		if err := os.Symlink(target, link); err != nil && !os.IsExist(err) {
			return err
		}
	}
	// Shared, as a distribution's init leaves it: programs that make mount namespaces meet here what they meet elsewhere.
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("share mounts: %w", err)
	}
	if err := loadModules("/lib/modules/load"); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte("lab")); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	for path, value := range map[string]string{
		"/proc/self/oom_score_adj":                   "-1000",
		"/proc/sys/vm/overcommit_memory":             "1",
		"/proc/sys/kernel/unprivileged_userns_clone": "1",
		// A vCPU that halts would be polled for 200 µs, in a loop of PAUSE. The emulator leaves its run loop at each of
		// those, so that an idle guest costs it a hundred times what a busy one does.
		"/sys/module/kvm/parameters/halt_poll_ns": "0",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("set %s: %w", path, err)
		}
	}
	return loopbackUp()
}

// loadModules loads the modules named in list, one path a line, already in the order of their dependencies.
func loadModules(list string) error {
	file, err := os.Open(list)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		path := strings.TrimSpace(lines.Text())
		if path == "" {
			continue
		}
		if err := loadModule(path); err != nil {
			return fmt.Errorf("load module %s: %w", path, err)
		}
	}
	return lines.Err()
}

func loadModule(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := unix.FinitModule(int(file.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return err
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket for lo: %w", err)
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, request); err != nil {
		return fmt.Errorf("get flags of lo: %w", err)
	}
	request.SetUint16(request.Uint16() | unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}
