package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// vacate makes empty directories in the place of whatever is there: files, links,
// mounts, files that nobody can remove.
func (s *session) vacate(r proto.VacateRequest) (proto.VacateResult, error) {
	if err := checkVacated(r.Directories); err != nil {
		return proto.VacateResult{}, err
	}
	if err := s.enter(); err != nil {
		return proto.VacateResult{}, err
	}
	return vacate(r.Directories)
}

func checkVacated(directories []proto.EmptyDirectory) error {
	for _, d := range directories {
		if d.Mode > 0o7777 {
			return failure(proto.CodeInvalidRequest, "mode %o", d.Mode)
		}
		if _, err := removablePath(d.Path); err != nil {
			return err
		}
	}
	return nil
}

// vacate makes directories that were checked.
func vacate(directories []proto.EmptyDirectory) (proto.VacateResult, error) {
	if len(directories) == 0 {
		return proto.VacateResult{}, nil
	}
	p, err := openProcfs()
	if err != nil {
		return proto.VacateResult{}, err
	}
	defer p.close()
	v := vacancy{procfs: p}
	err = v.vacate(directories)
	return v.result, err
}

// vacancy is one vacate.
type vacancy struct {
	*procfs
	result proto.VacateResult
}

func (v *vacancy) vacate(directories []proto.EmptyDirectory) error {
	paths := make([]string, len(directories))
	for i, d := range directories {
		path, err := removablePath(d.Path)
		if err != nil {
			return err
		}
		paths[i] = filepath.Clean(path)
		// Behind links the kernel would know what is mounted there by another path.
		if err := v.directory(filepath.Dir(paths[i])); err != nil {
			return notVacated(paths[i], err)
		}
	}
	if err := v.unmount(paths); err != nil {
		return notVacated(strings.Join(paths, " "), err)
	}
	for i, d := range directories {
		uid, gid := os.Getuid(), os.Getgid()
		if d.User != "" {
			who, err := lookupAccount(d.User)
			if err != nil {
				return err
			}
			uid, gid = int(who.uid), int(who.gid)
		}
		// Its parents may have been in one of the others.
		err := v.directory(filepath.Dir(paths[i]))
		if err == nil {
			err = v.remove(paths[i])
		}
		if err != nil {
			return notVacated(paths[i], err)
		}
		if err := v.make(paths[i], fs.FileMode(d.Mode), uid, gid); err != nil {
			return err
		}
	}
	return nil
}

func notVacated(path string, err error) error {
	return failure(proto.CodeNotVacated, "make room for %q: %v", path, err)
}

// directory sees to it that a path is a directory and its parents are, and none of
// them a link.
func (v *vacancy) directory(path string) error {
	if path == "/" {
		return nil
	}
	if err := v.directory(filepath.Dir(path)); err != nil {
		return err
	}
	info, err := os.Lstat(path)
	if err == nil && info.IsDir() {
		return nil
	}
	if err == nil {
		if err := v.remove(path); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Mkdir(path, 0o755)
}

// remove takes a tree away, also one that is immutable.
func (v *vacancy) remove(path string) error {
	err := os.RemoveAll(path)
	if errors.Is(err, syscall.EPERM) {
		v.unlock(filepath.Dir(path))
		_ = filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
			if err == nil && (d.IsDir() || d.Type().IsRegular()) {
				v.unlock(name)
			}
			return nil
		})
		err = os.RemoveAll(path)
	}
	return err
}

// unlock takes the flags off a file with which nobody can change it. That it cannot
// is seen when the file is still there.
func (v *vacancy) unlock(path string) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer f.Close()
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	const locks = unix.STATX_ATTR_IMMUTABLE | unix.STATX_ATTR_APPEND // the same bits as FS_IMMUTABLE_FL and FS_APPEND_FL
	if err == nil && flags&locks != 0 && unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags&^locks) == nil {
		v.result.Unlocked++
	}
}

// maxMounts bounds how many mounts lie on each other.
const maxMounts = 10_000

// unmount takes away what is mounted at paths and below them.
func (v *vacancy) unmount(paths []string) error {
	for range maxMounts {
		point, err := v.mountBelow(paths)
		if err != nil || point == "" {
			return err
		}
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return &os.PathError{Op: "unmount", Path: point, Err: err}
		}
		v.result.Unmounted++
	}
	return failure(proto.CodeIO, "more than %d file systems are mounted at %q", maxMounts, paths)
}

// maxMountinfo is more than the largest list of mounts that Linux makes by default
// (mount-max of 100,000).
const maxMountinfo = 64 << 20

// mountBelow returns the newest mount point at one of the paths or below, empty if there is
// none.
func (p *procfs) mountBelow(paths []string) (string, error) {
	list, err := p.read("self/mountinfo", maxMountinfo)
	if err != nil {
		return "", err
	}
	found := ""
	for line := range strings.Lines(string(list)) {
		f := strings.SplitN(line, " ", 6)
		if len(f) < 6 {
			continue
		}
		point := unescape(f[4])
		if slices.ContainsFunc(paths, func(path string) bool { return point == path || strings.HasPrefix(point, path+"/") }) {
			found = point
		}
	}
	return found, nil
}

// unescape undoes what mountinfo does to blanks: \040 and the like.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func (v *vacancy) make(path string, mode fs.FileMode, uid, gid int) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, syscall.EPERM) { // its parent is immutable
		v.unlock(filepath.Dir(path))
		err = os.Mkdir(path, 0o700)
	}
	if err == nil {
		err = os.Chown(path, uid, gid)
	}
	if err == nil {
		// After the owner; and not changed by an umask.
		err = syscall.Chmod(path, uint32(mode))
	}
	if err != nil {
		return fileError(err)
	}
	return nil
}
