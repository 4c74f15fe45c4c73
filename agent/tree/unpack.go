package tree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Options say what Unpack keeps.
type Options struct {
	// Owners keeps owners, set-user-id and set-group-id bits, and makes devices:
	// for a receiver that may do so and trusts the sender. Otherwise everything
	// belongs to the receiver.
	Owners bool
}

// ErrUnsafe is the cause of the error for a name that points out of the tree.
var ErrUnsafe = errors.New("name leads out of the tree")

// Unpack makes the entries of a tar stream below root. An entry replaces what
// has its name, but a directory stays a directory and gets what is new; a file
// appears complete or not at all. Directories get their modes and times last.
func Unpack(r io.Reader, root *os.Root, o Options) (Stats, error) {
	u := unpacker{root: root, options: o}
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			err = u.finish()
			if err != nil {
				err = fmt.Errorf("unpack tree: %w", err)
			}
			return u.stats, err
		}
		if err == nil {
			err = u.entry(h, archive)
		}
		if err != nil {
			return u.stats, fmt.Errorf("unpack tree: %w", err)
		}
	}
}

type unpacker struct {
	root    *os.Root
	options Options
	stats   Stats
	// directories wait for their modes, which may forbid writing, and times.
	directories []*tar.Header
}

func (u *unpacker) entry(h *tar.Header, contents io.Reader) error {
	name, err := local(h.Name)
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		return u.directory(name, h)
	}
	if name == "." {
		return fmt.Errorf("%q is no directory: %w", h.Name, ErrUnsafe)
	}
	if err := u.root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	u.stats.Entries++
	switch h.Typeflag {
	case tar.TypeReg:
		return u.file(name, h, contents)
	case tar.TypeSymlink:
		return u.replace(name, func(as string) error { return u.symlink(as, h) })
	case tar.TypeLink:
		target, err := local(h.Linkname)
		if err != nil {
			return err
		}
		return u.replace(name, func(as string) error { return u.root.Link(target, as) })
	case tar.TypeFifo, tar.TypeChar, tar.TypeBlock:
		if h.Typeflag == tar.TypeFifo || u.options.Owners {
			return u.replace(name, func(as string) error { return u.special(as, h) })
		}
	}
	u.stats.Entries--
	u.stats.Skipped++
	return nil
}

// local checks a name from a stream. os.Root would refuse it as well; this says
// what is wrong.
func local(name string) (string, error) {
	clean := path.Clean(strings.TrimPrefix(name, "./"))
	if path.IsAbs(clean) || clean == ".." || strings.HasPrefix(clean, "../") || strings.IndexByte(clean, 0) >= 0 {
		return "", fmt.Errorf("%.200q: %w", name, ErrUnsafe)
	}
	return clean, nil
}

func (u *unpacker) directory(name string, h *tar.Header) error {
	u.stats.Entries++
	info, err := u.root.Lstat(name)
	if err == nil && !info.IsDir() {
		err = u.root.Remove(name)
		info = nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if info == nil {
		if err := u.root.MkdirAll(name, 0o700); err != nil {
			return err
		}
	}
	copied := *h
	copied.Name = name
	u.directories = append(u.directories, &copied)
	return nil
}

// finish gives directories what they are to have, the deepest first.
func (u *unpacker) finish() error {
	for _, h := range slices.Backward(u.directories) {
		if err := u.dress(h.Name, h); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) file(name string, h *tar.Header, contents io.Reader) error {
	return u.replace(name, func(as string) error {
		f, err := u.root.OpenFile(as, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		n, err := io.Copy(f, contents)
		u.stats.Bytes += n
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		return u.dress(as, h)
	})
}

func (u *unpacker) symlink(as string, h *tar.Header) error {
	if err := u.root.Symlink(h.Linkname, as); err != nil {
		return err
	}
	if u.options.Owners {
		if err := u.root.Lchown(as, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if h.ModTime.IsZero() {
		return nil
	}
	// os.Root sets times of what a link leads to, not of the link.
	return u.beside(as, "utimensat", func(dir int, base string) error {
		modified, err := unix.TimeToTimespec(h.ModTime)
		if err != nil {
			return err
		}
		return unix.UtimesNanoAt(dir, base, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, modified}, unix.AT_SYMLINK_NOFOLLOW)
	})
}

// beside makes a system call that os.Root does not have, on a name in the directory that holds it.
func (u *unpacker) beside(name, op string, call func(dir int, base string) error) error {
	dir, err := u.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := call(int(dir.Fd()), path.Base(name)); err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	return nil
}

func (u *unpacker) special(as string, h *tar.Header) error {
	mode := uint32(unix.S_IFIFO)
	switch h.Typeflag {
	case tar.TypeChar:
		mode = unix.S_IFCHR
	case tar.TypeBlock:
		mode = unix.S_IFBLK
	}
	device := unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))
	err := u.beside(as, "mknod", func(dir int, base string) error { return unix.Mknodat(dir, base, mode|0o600, int(device)) })
	if err != nil {
		return err
	}
	return u.dress(as, h)
}

// dress gives a file or directory its owner, mode and time, in this order: a new
// owner takes the set-user-id bit away.
func (u *unpacker) dress(name string, h *tar.Header) error {
	mode := h.FileInfo().Mode()
	if u.options.Owners {
		if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
			return err
		}
	} else {
		mode &^= fs.ModeSetuid | fs.ModeSetgid
	}
	if err := u.root.Chmod(name, mode&(fs.ModePerm|fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky)); err != nil {
		return err
	}
	if h.ModTime.IsZero() {
		return nil
	}
	return u.root.Chtimes(name, time.Time{}, h.ModTime)
}

// replace makes an entry under another name and moves it over what has its own.
func (u *unpacker) replace(name string, make func(as string) error) error {
	as := path.Join(path.Dir(name), temporary)
	if err := u.root.Remove(as); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := make(as); err != nil {
		u.root.Remove(as)
		return err
	}
	if info, err := u.root.Lstat(name); err == nil && info.IsDir() {
		u.root.Remove(as)
		return &fs.PathError{Op: "replace", Path: name, Err: unix.EISDIR}
	}
	if err := u.root.Rename(as, name); err != nil {
		u.root.Remove(as)
		return err
	}
	// Two names of one file: rename does nothing then.
	if err := u.root.Remove(as); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// temporary is the name that an entry has until it is complete.
const temporary = ".forkvm-unpack"
