package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// immutable makes files and directories immutable, as chattr +i does.
func immutable(paths []string) error {
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		if err == nil {
			err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags|unix.STATX_ATTR_IMMUTABLE) // the same bit
		}
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
