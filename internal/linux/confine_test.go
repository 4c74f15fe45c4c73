package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// confinedIn makes the test binary a process that confines itself to the directory that it names, and says what it can still do.
const confinedIn = "FORKVM_TEST_CONFINED_IN"

// TestConfine: a process that has confined itself sees its directory and nothing else, and no thread of it has privileges.
func TestConfine(t *testing.T) {
	if dir := os.Getenv(confinedIn); dir != "" {
		if err := confinedAttempts(dir); err != nil {
			t.Fatal(err)
		}
		return
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno != 0 {
		t.Skip("needs a test program without cgo, as our programs are: CGO_ENABLED=0 go test")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestConfine$")
	cmd.Env = append(os.Environ(), confinedIn+"="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(dir, "inside")); err != nil {
		t.Error("a file that was written afterwards is not in the directory:", err)
	}
}

func confinedAttempts(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	// A thread that was there before, and has to lose its privileges, too.
	asked, told := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread()
		<-asked
		told <- unprivileged()
	}()
	if err := Confine(dir); err != nil {
		return err
	}
	close(asked)
	errs := []error{<-told, unprivileged(), os.WriteFile("/inside", nil, 0o600)}
	for _, outside := range []string{"/proc/self/status", "/etc/passwd", "../etc/passwd", "/sys/fs/cgroup"} {
		if _, err := os.Stat(outside); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s: %w", outside, err))
		}
	}
	if err := unix.Chroot("/"); !errors.Is(err, unix.EPERM) {
		errs = append(errs, fmt.Errorf("changes its root: %w", err))
	}
	if err := unix.Unshare(unix.CLONE_NEWUSER); err == nil {
		errs = append(errs, errors.New("makes itself a namespace of users"))
	}
	return errors.Join(errs...)
}

// unprivileged looks at the calling thread.
func unprivileged() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return err
	}
	if sets != [2]unix.CapUserData{} {
		return fmt.Errorf("a thread has capabilities %+v", sets)
	}
	if n, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); n != 1 {
		return fmt.Errorf("a thread may get privileges (%v)", err)
	}
	return nil
}
