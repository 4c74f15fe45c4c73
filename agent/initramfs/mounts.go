package initramfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// mountPoint is one of the file systems that every Linux program expects.
type mountPoint struct {
	path, kind string
	flags      uintptr
	options    string
	optional   bool // a kernel may have been built without it
}

const noExec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// early are needed to find the root device and are carried over to it.
var early = []mountPoint{
	{path: "/dev", kind: "devtmpfs", flags: unix.MS_NOSUID, options: "mode=0755"},
	{path: "/proc", kind: "proc", flags: noExec},
	{path: "/sys", kind: "sysfs", flags: noExec},
	{path: "/run", kind: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, options: "mode=0755"},
}

// cgroup is mounted before the distribution's init runs, with the options that
// systemd would use, because the guest agent is there first.
var cgroup = mountPoint{path: "/sys/fs/cgroup", kind: "cgroup2", flags: noExec, options: "nsdelegate,memory_recursiveprot", optional: true}

// late are what a distribution's init mounts itself.
var late = []mountPoint{
	{path: "/dev/pts", kind: "devpts", flags: unix.MS_NOSUID | unix.MS_NOEXEC, options: "gid=5,mode=0620,ptmxmode=0666", optional: true},
	{path: "/dev/shm", kind: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, options: "mode=1777"},
	{path: "/tmp", kind: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, options: "mode=1777"},
}

// mount mounts one of them, unless something of that kind is there already.
func (m mountPoint) mount() error {
	if err := os.MkdirAll(m.path, 0o755); err != nil {
		if m.optional {
			return nil
		}
		return fmt.Errorf("create mount point: %w", err)
	}
	err := unix.Mount(m.kind, m.path, m.kind, m.flags, m.options)
	if errors.Is(err, unix.EINVAL) && m.options != "" {
		// An option that this kernel does not know yet.
		err = unix.Mount(m.kind, m.path, m.kind, m.flags, "")
	}
	if err == nil || errors.Is(err, unix.EBUSY) || m.optional && errors.Is(err, unix.ENODEV) {
		return nil
	}
	return fmt.Errorf("mount %s on %s: %w", m.kind, m.path, err)
}

func mountAll(list []mountPoint) error {
	for _, m := range list {
		if err := m.mount(); err != nil {
			return err
		}
	}
	return nil
}

// links are names in /dev that devtmpfs does not have and shells rely on.
func links() {
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		os.Symlink(target, filepath.Join("/dev", name))
	}
}

// loopback brings up lo, without which a database does not listen.
func loopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return err
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}
