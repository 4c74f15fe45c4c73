package tapnet

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// number is a namespace's, which no other has as long as it is there.
func number(space *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(space.Fd()), &st); err != nil {
		return 0, fmt.Errorf("stat network namespace: %w", err)
	}
	return st.Ino, nil
}

// set writes kernel parameters of the calling thread's namespace.
func set(parameters ...[2]string) error {
	for _, p := range parameters {
		if err := os.WriteFile("/proc/sys/net/"+p[0], []byte(p[1]), 0); err != nil {
			return fmt.Errorf("set parameter net/%s: %w", p[0], err)
		}
	}
	return nil
}

// hasIPv6 says whether the calling thread's namespace has IPv6 at all.
func hasIPv6() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return !errors.Is(err, os.ErrNotExist)
}
