package linux

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// GroupMemory is the memory of a control group that has a limit.
type GroupMemory struct {
	Path string // of the group, from the root of the hierarchy that is visible here
	// Limit is memory.max or, if that is less, memory.high: above that one processes
	// are slowed down until they hardly run.
	Limit uint64 // bytes
	// Used is what the kernel cannot take back: without page cache of files.
	Used uint64 // bytes
}

// Free is how much of the limit is left.
func (g GroupMemory) Free() uint64 { return g.Limit - min(g.Limit, g.Used) }

// MemoryGroup finds the control group that bounds what a process may still use: its own
// or one above it, whichever has the least room. It is false if none has a limit, or
// none can be seen: in version 1 of control groups, or outside of this namespace.
func MemoryGroup(pid int) (GroupMemory, bool) {
	return memoryGroup("/sys/fs/cgroup", "/proc/"+strconv.Itoa(pid)+"/cgroup")
}

// SameGroup reports whether two processes are in the same control groups.
func SameGroup(pid, other int) bool {
	a, errA := readSmall("/proc/" + strconv.Itoa(pid) + "/cgroup")
	b, errB := readSmall("/proc/" + strconv.Itoa(other) + "/cgroup")
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

func memoryGroup(root, membership string) (least GroupMemory, found bool) {
	text, err := readSmall(membership)
	if err != nil {
		return least, false
	}
	at, ok := unifiedPath(string(text))
	if !ok {
		return least, false
	}
	for {
		if g, ok := readGroup(root, at); ok && (!found || g.Free() < least.Free()) {
			least, found = g, true
		}
		if at == "/" {
			return least, found
		}
		at = path.Dir(at)
	}
}

// unifiedPath is the path of the group of version 2 in a process's list of groups.
func unifiedPath(text string) (string, bool) {
	for line := range strings.Lines(text) {
		at, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if ok && strings.HasPrefix(at, "/") && !strings.HasPrefix(at, "/..") {
			return path.Clean(at), true
		}
	}
	return "", false
}

// readGroup is false for a group without a limit.
func readGroup(root, at string) (g GroupMemory, ok bool) {
	dir := filepath.Join(root, at)
	limit := uint64(1<<64 - 1)
	for _, file := range []string{"memory.max", "memory.high"} {
		if n, ok := readNumber(filepath.Join(dir, file)); ok {
			limit = min(limit, n)
		}
	}
	if limit == 1<<64-1 {
		return g, false
	}
	used, ok := readNumber(filepath.Join(dir, "memory.current"))
	if !ok {
		return g, false
	}
	stat, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return g, false
	}
	return GroupMemory{Path: at, Limit: limit, Used: used - min(used, reclaimable(string(stat)))}, true
}

// reclaimable adds up what memory.stat says that the kernel can do without.
func reclaimable(stat string) (n uint64) {
	for line := range strings.Lines(stat) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch name {
		case "active_file", "inactive_file", "slab_reclaimable":
			bytes, _ := strconv.ParseUint(value, 10, 64)
			n += bytes
		}
	}
	return n
}

// readNumber is false for "max" and for what is not there.
func readNumber(file string) (uint64, bool) {
	text, err := readSmall(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}

// readSmall reads a file of the kernel that fits a page. It is read before each VM is
// made, and without the runtime's poller that takes half the work.
func readSmall(file string) ([]byte, error) {
	var fd, n int
	err := ignoringEINTR(func() (err error) { fd, err = unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0); return err })
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: file, Err: err}
	}
	defer unix.Close(fd)
	b := make([]byte, 4096)
	if err := ignoringEINTR(func() (err error) { n, err = unix.Read(fd, b); return err }); err != nil {
		return nil, &os.PathError{Op: "read", Path: file, Err: err}
	}
	return b[:n], nil
}
