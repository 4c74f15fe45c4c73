package rootfs

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/guest/rootfs/ext4"
)

// inode identifies a file on the host.
type inode struct{ device, number uint64 }

// directoryWalk adds a directory tree of the host. All access goes through an os.Root, so that a tree that changes meanwhile cannot make
// us read anything outside of it. Other file systems mounted inside are part of the tree.
type directoryWalk struct {
	*builder
	root  *os.Root
	names map[inode]string // of files with several names: the first one
}

func (b *builder) addDirectory(name string) error {
	root, err := os.OpenRoot(name)
	if err != nil {
		return err
	}
	defer root.Close()
	w := &directoryWalk{builder: b, root: root, names: map[inode]string{}}
	return w.addTree(".")
}

func (w *directoryWalk) addTree(name string) error {
	info, err := w.root.Lstat(name)
	if err != nil {
		return err
	}
	if err := w.addFile(name, info); err != nil {
		return err
	}
	if !info.IsDir() {
		return nil
	}
	children, err := w.list(name)
	if err != nil {
		return err
	}
	for _, child := range children {
		if err := w.addTree(path.Join(name, child)); err != nil {
			return err
		}
	}
	return nil
}

// list reads a directory's names, sorted.
func (w *directoryWalk) list(name string) ([]string, error) {
	dir, err := w.root.Open(name)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

func (w *directoryWalk) addFile(name string, info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return &EntryError{Name: name, Cause: fmt.Errorf("no owner to be found out")}
	}
	e := entry{name: name, kind: kindOf(info.Mode())}
	if stat.Nlink > 1 && e.kind != ext4.Directory {
		id := inode{stat.Dev, stat.Ino}
		if first, seen := w.names[id]; seen {
			e.hardLink = first
			return w.add(e)
		}
		w.names[id] = name
	}
	e.attributes = ext4.Attributes{
		Mode:    uint16(stat.Mode & 0o7777),
		UID:     stat.Uid,
		GID:     stat.Gid,
		ModTime: time.Unix(stat.Mtim.Unix()),
	}
	switch e.kind {
	case ext4.Symlink:
		target, err := w.root.Readlink(name)
		if err != nil {
			return err
		}
		e.target = target
	case ext4.CharacterDevice, ext4.BlockDevice:
		e.major, e.minor = unix.Major(stat.Rdev), unix.Minor(stat.Rdev)
	case ext4.File, ext4.Directory:
		return w.addOpened(e)
	}
	return w.add(e)
}

// addOpened adds an entry that has to be opened, for its content or its extended attributes.
func (w *directoryWalk) addOpened(e entry) error {
	// Not blocking, in case the name has become a fifo since it was looked at.
	f, err := w.root.OpenFile(e.name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if kindOf(info.Mode()) != e.kind {
		return &EntryError{Name: e.name, Cause: fmt.Errorf("changed while it was read")}
	}
	if e.attributes.Xattrs, err = xattrs(f); err != nil {
		return &EntryError{Name: e.name, Cause: fmt.Errorf("read extended attributes: %w", err)}
	}
	if e.kind == ext4.File {
		e.size, e.content = info.Size(), contextReader{w.ctx, f}
	}
	return w.add(e)
}

func kindOf(mode fs.FileMode) ext4.Kind {
	switch mode.Type() {
	case fs.ModeDir:
		return ext4.Directory
	case fs.ModeSymlink:
		return ext4.Symlink
	case fs.ModeNamedPipe:
		return ext4.Fifo
	case fs.ModeSocket:
		return ext4.Socket
	case fs.ModeDevice:
		return ext4.BlockDevice
	case fs.ModeDevice | fs.ModeCharDevice:
		return ext4.CharacterDevice
	default:
		return ext4.File
	}
}

// hostOnly are extended attributes that say something about the host, not about the content.
func hostOnly(name string) bool {
	return name == "security.selinux" || name == "security.ima" || name == "security.evm" ||
		strings.HasPrefix(name, "trusted.") || strings.HasPrefix(name, "system.nfs")
}

// xattrs reads an open file's extended attributes, as far as the host's file system has any.
func xattrs(f *os.File) (map[string][]byte, error) {
	list := make([]byte, 64<<10) // the most that Linux gives
	n, err := unix.Flistxattr(int(f.Fd()), list)
	if err == unix.ENOTSUP || n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	result := map[string][]byte{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if hostOnly(name) {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Fgetxattr(int(f.Fd()), name, value)
		if err != nil {
			return nil, err
		}
		result[name] = value[:n]
	}
	return result, nil
}
