package agent

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	machineIDPath = "/etc/machine-id"
	bootIDPath    = "/proc/sys/kernel/random/boot_id"
)

// NewIdentity returns the identity of the machine that this process runs on.
// stateDir is a directory on a tmpfs; it holds files that stand in for those of
// the kernel.
func NewIdentity(stateDir string) Identity {
	return machine{stateDir, func(source, target string) error { return unix.Mount(source, target, "", unix.MS_BIND, "") }}
}

type machine struct {
	stateDir string
	mount    func(source, target string) error
}

func (machine) AddEntropy(p []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := addEntropy(f.Fd(), p); err != nil {
		return fmt.Errorf("credit entropy: %w", err)
	}
	// Credited bytes wait in the input pool; without this the generator, whose
	// state the clone shares with its parent, would go on for up to a minute.
	if err := unix.IoctlSetInt(int(f.Fd()), unix.RNDRESEEDCRNG, 0); err != nil {
		return fmt.Errorf("reseed generator: %w", err)
	}
	return nil
}

func (machine) SetClock(t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return err
	}
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		return fmt.Errorf("set clock: %w", err)
	}
	return nil
}

func (machine) SetHostname(name string) error {
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set hostname: %w", err)
	}
	return nil
}

func (m machine) SetMachineID(id string) error {
	return m.setMachineID(machineIDPath, id)
}

// setMachineID covers the file at path, if there is one, as systemd does where it
// cannot write it. Written on the disk, an id of its own would cost each clone a
// transaction of the file system, and would be in what comes of its disk.
func (m machine) setMachineID(path, id string) error {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	return m.cover(target, "machine-id", []byte(id+"\n"))
}

func (m machine) RenewBootID() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", err
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // version 4, RFC 9562 5.4
	h := hex.EncodeToString(b[:])
	id := h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
	if err := m.cover(bootIDPath, "boot_id", []byte(id+"\n")); err != nil {
		return "", err
	}
	return id, nil
}

// cover makes target read as content: a file in the state directory is mounted
// over it. In a clone of a clone it is mounted already, and is overwritten in
// place, so that mounts do not pile up.
func (m machine) cover(target, name string, content []byte) error {
	source := filepath.Join(m.stateDir, name)
	if size, ok := covered(source, target); ok {
		f, err := os.OpenFile(source, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		if size > int64(len(content)) { // somebody in the guest has written to it
			err = f.Truncate(0)
		}
		if err == nil {
			_, err = f.WriteAt(content, 0)
		}
		return err
	}
	if err := replaceFile(source, content, 0o444); err != nil {
		return err
	}
	if err := m.mount(source, target); err != nil {
		return fmt.Errorf("mount %s over %s: %w", source, target, err)
	}
	return nil
}

// covered tells whether both names lead to the same file, and its size.
func covered(source, target string) (size int64, yes bool) {
	a, err1 := os.Stat(source)
	b, err2 := os.Stat(target)
	if err1 != nil || err2 != nil || !os.SameFile(a, b) {
		return 0, false
	}
	return a.Size(), true
}

// replaceFile puts a file in place by rename, creating its directory if it is
// missing.
func replaceFile(path string, content []byte, mode fs.FileMode) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".forkvm-*")
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(dir, 0o755); err == nil {
			f, err = os.CreateTemp(dir, ".forkvm-*")
		}
	}
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// uptime is the time since the guest's boot, suspension included.
func uptime() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func isTransient(err error) bool {
	for _, e := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS, unix.ECONNABORTED, unix.EINTR} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
