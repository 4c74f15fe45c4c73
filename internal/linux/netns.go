package linux

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// OwnNetwork opens the network namespace of the calling thread.
func OwnNetwork() (*os.File, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	return f, nil
}

// NewNetwork calls do on a thread in a new network namespace, and returns that.
func NewNetwork(do func() error) (*os.File, error) {
	return apart(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create network namespace: %w", err)
		}
		return nil
	}, do)
}

// InNetwork calls do on a thread in a network namespace. Processes that do starts are in it, too.
func InNetwork(space *os.File, do func() error) error {
	f, err := apart(func() error {
		fd, err := descriptor(space)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
		}
		if err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return nil
	}, do)
	if err == nil {
		err = f.Close()
	}
	return err
}

// apart calls both on a thread that ends with it, and returns its network namespace. The process's first thread cannot end, and
// is what others take for the process: it stays where it is.
func apart(enter, do func() error) (space *os.File, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			space, err = apart(enter, do) // on another, as this one is taken
			runtime.UnlockOSThread()
			return
		}
		// Never unlocked: the thread ends with the goroutine.
		if err = enter(); err != nil {
			return
		}
		if space, err = OwnNetwork(); err != nil {
			return
		}
		if err = do(); err != nil {
			space.Close()
			space = nil
		}
	}()
	<-done
	return space, err
}
