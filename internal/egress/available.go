package egress

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// UnavailableError says that the kernel cannot be had for this here, and what would have to be otherwise.
type UnavailableError struct {
	Cause error
	Fix   string
}

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("the kernel cannot enforce a network policy here: %v: %s", e.Cause, e.Fix)
}

func (e *UnavailableError) Unwrap() error { return e.Cause }

func unavailable(cause error, fix string) error { return &UnavailableError{Cause: cause, Fix: fix} }

var (
	errPrivilege = errors.New("this process is not root's, or lacks CAP_SYS_ADMIN (or CAP_BPF and CAP_NET_ADMIN) or CAP_SYS_CHROOT")
	errNoPins    = errors.New("no file system of type bpf is at " + pinRoot)
)

// Available says what is missing that can be known without trying: an *UnavailableError.
func Available() error {
	_, err := parent()
	return err
}

// parent is the control group below which groups are made.
func parent() (string, error) {
	if err := privileged(); err != nil {
		return "", err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(pinRoot, &st); err != nil || st.Type != unix.BPF_FS_MAGIC {
		return "", unavailable(errNoPins, "mount -t bpf bpf "+pinRoot)
	}
	own, err := linux.ControlGroup()
	if err != nil {
		return "", unavailable(err, "mount version 2 of control groups at /sys/fs/cgroup")
	}
	return own, nil
}

func privileged() error {
	own, err := linux.OwnCapabilities()
	if err != nil {
		return err
	}
	loads := own.Has(unix.CAP_SYS_ADMIN) || own.Has(unix.CAP_BPF) && own.Has(unix.CAP_NET_ADMIN)
	if os.Geteuid() != 0 || !loads || !own.Has(unix.CAP_SYS_CHROOT) {
		return unavailable(errPrivilege, "run as root")
	}
	return nil
}

// explain tells errors of a kernel that cannot from others: one that is too old, or keeps eBPF from this process, as
// containers and locked-down kernels do.
func explain(err error) error {
	switch {
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.ENOSYS):
		return unavailable(err, "Linux 5.14 or later is needed, with CONFIG_CGROUP_BPF")
	case errors.Is(err, unix.EPERM):
		return unavailable(err, "run outside of a container or sandbox that forbids eBPF")
	}
	return err
}
