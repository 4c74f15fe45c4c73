package linux

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// UnnamedFile creates a file without a name in directory dir's file system
// (O_TMPFILE), open for reading and writing. It vanishes with its last
// descriptor unless LinkFile gives it a name. A file system that has none
// answers EOPNOTSUPP.
func UnnamedFile(dir string, perm os.FileMode) (*os.File, error) {
	fd, err := -1, error(nil)
	err = ignoringEINTR(func() (err error) {
		fd, err = unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, uint32(perm.Perm()))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create unnamed file (%s): %w", dir, err)
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir, "(unnamed)")), nil
}

// InMemory reports whether a directory is in a file system in memory. Collapse makes
// its files huge pages, whatever it was mounted with.
func InMemory(dir string) bool {
	var st unix.Statfs_t
	err := ignoringEINTR(func() error { return unix.Statfs(dir, &st) })
	return err == nil && st.Type == unix.TMPFS_MAGIC
}

// FreeBytes is how much room the file system of a directory has for its users.
func FreeBytes(dir string) (uint64, error) {
	var st unix.Statfs_t
	if err := ignoringEINTR(func() error { return unix.Statfs(dir, &st) }); err != nil {
		return 0, err
	}
	return st.Bavail * uint64(st.Bsize), nil
}

// LinkFile gives an unnamed file the name path, which must not exist (EEXIST)
// and must be in the same file system (EXDEV).
func LinkFile(f *os.File, path string) error {
	err := unix.Linkat(int(f.Fd()), "", unix.AT_FDCWD, path, unix.AT_EMPTY_PATH)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPERM) {
		// The direct form wants CAP_DAC_READ_SEARCH on older kernels.
		self := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
		err = unix.Linkat(unix.AT_FDCWD, self, unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	}
	if err != nil {
		return fmt.Errorf("link file (%s): %w", path, err)
	}
	return nil
}

// CloseFiles closes those of the files that are not nil.
func CloseFiles(files ...*os.File) error {
	var errs []error
	for _, f := range files {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// PunchHole frees a range of a file; it reads as zeros afterwards, and the size
// stays. EOPNOTSUPP if the file system cannot.
func PunchHole(f *os.File, offset, length int64) error {
	err := ignoringEINTR(func() error {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, length)
	})
	if err != nil {
		return fmt.Errorf("punch hole (%s, offset %d, %d bytes): %w", f.Name(), offset, length, err)
	}
	return nil
}

// NextData finds the first stretch of data at or after offset: [start, end) with
// a hole or the end of the file behind it. start == end means there is no more.
// It moves the descriptor's offset, which nothing else may rely on. On file
// systems that do not know holes all of the file is data.
func NextData(f *os.File, offset int64) (start, end int64, err error) {
	start, err = unix.Seek(int(f.Fd()), offset, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return offset, offset, nil
	}
	if err == nil {
		end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("seek data (%s, offset %d): %w", f.Name(), offset, err)
	}
	return start, end, nil
}

// WriteWhole writes a file that appears under its name complete or not at all, for the
// calling user alone. It is in the kernel's memory then, not on stable storage. Of a
// process that dies here a file is left whose name begins with ".new-".
func WriteWhole(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// Flock takes or gives back a lock on an open file, see flock(2). A signal does not
// end the wait for it.
func Flock(f *os.File, how int) error {
	if err := ignoringEINTR(func() error { return unix.Flock(int(f.Fd()), how) }); err != nil {
		return fmt.Errorf("lock (%s): %w", f.Name(), err)
	}
	return nil
}

// SyncData writes a file's data, and what metadata is needed to read it, to
// stable storage.
func SyncData(f *os.File) error {
	if err := ignoringEINTR(func() error { return unix.Fdatasync(int(f.Fd())) }); err != nil {
		return fmt.Errorf("sync data (%s): %w", f.Name(), err)
	}
	return nil
}
