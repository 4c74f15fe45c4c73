package initramfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// loadModules loads what it can. One that fails need not matter, and if it
// does, the reason is wanted where its absence is noticed.
func loadModules(paths []string, log func(string)) (failed []error) {
	for _, path := range paths {
		if err := loadModule(path); err != nil {
			log(err.Error())
			failed = append(failed, err)
		}
	}
	return failed
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("load module (%s): not in the initramfs", path)
	}
	if err != nil {
		return fmt.Errorf("load module: %w", err)
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if err == nil || errors.Is(err, unix.EEXIST) {
		return nil
	}
	return fmt.Errorf("load module (%s): %w%s", path, err, moduleHint(err))
}

// moduleHint says what the kernel's error numbers mean here (init_module(2)).
func moduleHint(err error) string {
	switch {
	case errors.Is(err, unix.ENOENT):
		return ": it needs a symbol that nothing loaded before it provides"
	case errors.Is(err, unix.ENOEXEC):
		return ": not a module for this kernel, or compressed"
	case errors.Is(err, unix.EKEYREJECTED):
		return ": its signature is not one that this kernel trusts"
	}
	return ""
}
