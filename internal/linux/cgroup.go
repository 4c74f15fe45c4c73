package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// groupRoots are where version 2 of control groups is mounted, alone or beside version 1.
var groupRoots = [...]string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}

// ControlGroup is the directory of the calling process's own control group, of version 2.
func ControlGroup() (string, error) {
	text, err := readSmall("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("find control group: %w", err)
	}
	at, ok := unifiedPath(string(text))
	if !ok {
		return "", errors.New("find control group: this process is in none of version 2 that can be seen here")
	}
	for _, root := range groupRoots {
		if unified(root) {
			return filepath.Join(root, at), nil
		}
	}
	return "", fmt.Errorf("find control group: version 2 is mounted at none of %v", groupRoots)
}

// InControlGroups says whether a path is below where control groups of version 2 are mounted.
func InControlGroups(path string) bool {
	for _, root := range groupRoots {
		if unified(root) && strings.HasPrefix(path, root+"/") && filepath.Clean(path) == path {
			return true
		}
	}
	return false
}

// kernfsHandle is the type of file handles that hold nothing but a number (FILEID_KERNFS).
const kernfsHandle = 0xfe

// ControlGroupGone says that no control group of version 2 has this number. It needs CAP_DAC_READ_SEARCH.
func ControlGroupGone(id uint64) bool {
	for _, root := range groupRoots {
		if !unified(root) {
			continue
		}
		mount, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return false
		}
		handle := unix.NewFileHandle(kernfsHandle, binary.NativeEndian.AppendUint64(nil, id))
		fd, err := unix.OpenByHandleAt(mount, handle, unix.O_PATH|unix.O_CLOEXEC)
		unix.Close(mount)
		if err == nil {
			unix.Close(fd)
		}
		return errors.Is(err, unix.ESTALE)
	}
	return false
}

func unified(root string) bool {
	var st unix.Statfs_t
	return unix.Statfs(root, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}
