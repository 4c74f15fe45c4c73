package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
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
	v := vacancy{}
	for _, d := range directories {
		if err := v.vacate(d); err != nil {
			return v.result, err
		}
	}
	return v.result, nil
}

// vacancy is one vacate.
type vacancy struct{ result proto.VacateResult }

func (v *vacancy) vacate(d proto.EmptyDirectory) error {
	path, err := removablePath(d.Path)
	if err != nil {
		return err
	}
	path = filepath.Clean(path)
	uid, gid := os.Getuid(), os.Getgid()
	if d.User != "" {
		who, err := lookupAccount(d.User)
		if err != nil {
			return err
		}
		uid, gid = int(who.uid), int(who.gid)
	}
	if err := v.clear(path); err != nil {
		return failure(proto.CodeNotVacated, "make room for %q: %v", path, err)
	}
	return v.make(path, fs.FileMode(d.Mode), uid, gid)
}

// clear removes what has the path, and what stands in the way of its parents.
func (v *vacancy) clear(path string) error {
	if parent := filepath.Dir(path); parent != "/" {
		if err := v.directory(parent); err != nil {
			return err
		}
	}
	if err := v.unmount(path); err != nil {
		return err
	}
	return v.remove(path)
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

// unmount takes away what is mounted at a path and below it.
func (v *vacancy) unmount(path string) error {
	p, err := openProcfs()
	if err != nil {
		return err
	}
	defer p.close()
	for range maxMounts {
		point, err := p.mountBelow(path)
		if err != nil || point == "" {
			return err
		}
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return &os.PathError{Op: "unmount", Path: point, Err: err}
		}
		v.result.Unmounted++
	}
	return failure(proto.CodeIO, "more than %d file systems are mounted at %q", maxMounts, path)
}

// maxMountinfo is more than the largest list of mounts that Linux makes by default
// (mount-max of 100,000).
const maxMountinfo = 64 << 20

// mountBelow returns the newest mount point at a path or below it, empty if there is
// none.
func (p *procfs) mountBelow(path string) (string, error) {
	list, err := p.read("self/mountinfo", maxMountinfo)
	if err != nil {
		return "", err
	}
	found := ""
	for line := range strings.Lines(string(list)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		if point := unescape(f[4]); point == path || strings.HasPrefix(point, path+"/") {
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
