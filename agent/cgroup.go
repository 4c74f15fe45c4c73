package agent

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// FindCgroup returns the directory "forkvm" in this guest's cgroup v2
// hierarchy, for Config.Cgroup, or an error when there is no such hierarchy.
// It stands beside the groups of the guest's own service manager, which leaves
// groups alone that it did not make.
func FindCgroup() (string, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	mount, ok := cgroupMount(mounts)
	if !ok {
		return "", errors.New("no cgroup v2 file system is mounted")
	}
	return filepath.Join(mount, "forkvm"), nil
}

// cgroupMount finds the first cgroup2 in a mountinfo file (proc(5)).
func cgroupMount(mountinfo []byte) (string, bool) {
	for line := range bytes.Lines(mountinfo) {
		head, tail, ok := strings.Cut(string(line), " - ")
		fields := strings.Fields(head)
		if ok && len(fields) > 4 && strings.HasPrefix(tail, "cgroup2 ") {
			return fields[4], true
		}
	}
	return "", false
}

// agentGroup is the agent's own group, beside those of commands.
const agentGroup = "agent"

// maxResident is the memory in bytes that the agent may need to answer.
const maxResident = 16 << 20

// Enclose moves this process into the group "agent" beside the commands'
// groups, so that neither the guest's service manager nor a limit on the
// commands touches it. dir is Config.Cgroup.
func Enclose(dir string) error {
	group := filepath.Join(dir, agentGroup)
	if err := os.MkdirAll(group, 0o755); err != nil {
		return err
	}
	return writeFile(filepath.Join(group, "cgroup.procs"), strconv.Itoa(os.Getpid()))
}

// cgroups makes a group for each command.
type cgroups struct {
	dir string

	mu       sync.Mutex
	next     int
	leftover []string // commands that ended and left processes behind
}

func openCgroups(dir string) (*cgroups, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create cgroup (%s): %w", dir, err)
	}
	// Only memory is needed, to see out-of-memory kills. It is missing on some
	// hosts, which costs that flag and nothing else.
	writeFile(filepath.Join(filepath.Dir(dir), "cgroup.subtree_control"), "+memory")
	writeFile(filepath.Join(dir, "cgroup.subtree_control"), "+memory")
	// The agent's own pages are not taken back when memory is short: it would answer
	// in minutes then. A group has what its parent has, at most.
	for _, group := range []string{dir, filepath.Join(dir, agentGroup)} {
		writeFile(filepath.Join(group, "memory.min"), strconv.Itoa(maxResident))
	}
	c := &cgroups{dir: dir}
	c.adopt()
	return c, nil
}

// adopt takes over groups that an earlier agent of this guest left behind.
func (c *cgroups) adopt() {
	entries, _ := os.ReadDir(c.dir)
	for _, e := range entries {
		if n, err := strconv.Atoi(strings.TrimPrefix(e.Name(), "exec-")); err == nil && e.IsDir() {
			c.next = max(c.next, n)
			c.leftover = append(c.leftover, filepath.Join(c.dir, e.Name()))
		}
	}
	c.sweep()
}

// create makes an empty group.
func (c *cgroups) create() (*cgroup, error) {
	c.mu.Lock()
	c.next++
	g := &cgroup{dir: filepath.Join(c.dir, "exec-"+strconv.Itoa(c.next)), owner: c}
	c.mu.Unlock()
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		return nil, fmt.Errorf("create cgroup (%s): %w", g.dir, err)
	}
	f, err := os.Open(g.dir)
	if err != nil {
		os.Remove(g.dir)
		return nil, fmt.Errorf("open cgroup (%s): %w", g.dir, err)
	}
	g.fd = f
	return g, nil
}

// sweep removes groups whose last background process has gone since. Nothing
// wakes up for that: it happens when a command ends.
func (c *cgroups) sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := c.leftover[:0]
	for _, dir := range c.leftover {
		if removeGroup(dir) != nil {
			kept = append(kept, dir)
		}
	}
	c.leftover = kept
}

// removeGroup removes an empty group and the groups that a command may have
// made inside it.
func removeGroup(dir string) error {
	err := syscall.Rmdir(dir)
	if err == nil || errors.Is(err, syscall.ENOENT) {
		return nil
	}
	if populated(dir) {
		return err
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeGroup(filepath.Join(dir, e.Name()))
		}
	}
	return syscall.Rmdir(dir)
}

// cgroup holds one command and its descendants, whatever they do to their
// sessions, process groups and parents.
type cgroup struct {
	dir   string
	fd    *os.File
	owner *cgroups
}

// kill ends every process in the group and does not wait.
func (g *cgroup) kill() {
	if writeFile(filepath.Join(g.dir, "cgroup.kill"), "1") == nil {
		return
	}
	// Before Linux 5.14. Frozen, so that they do not multiply meanwhile.
	writeFile(filepath.Join(g.dir, "cgroup.freeze"), "1")
	for _, pid := range g.processes() {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	writeFile(filepath.Join(g.dir, "cgroup.freeze"), "0")
}

// processes lists the pids in the group and in the groups below it.
func (g *cgroup) processes() []int {
	var pids []int
	filepath.WalkDir(g.dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() != "cgroup.procs" {
			return nil
		}
		list, _ := os.ReadFile(path)
		for _, f := range strings.Fields(string(list)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// end kills what is in the group and waits, for a moment at most, until
// nothing is.
func (g *cgroup) end() {
	deadline := time.Now().Add(5 * time.Second)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		g.kill()
		if !populated(g.dir) || time.Now().After(deadline) {
			return
		}
		time.Sleep(pause)
	}
}

// oomKills returns how many of the group's processes the kernel killed for
// want of memory; 0 when it does not count them.
func (g *cgroup) oomKills() int {
	b, _ := os.ReadFile(filepath.Join(g.dir, "memory.events"))
	return flatKey(b, "oom_kill")
}

// peakMemory returns the most memory in bytes that the group had at once, 0 if the
// kernel does not say.
func (g *cgroup) peakMemory() int64 {
	b, _ := os.ReadFile(filepath.Join(g.dir, "memory.peak"))
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// close gives the group up. Processes in it go on.
func (g *cgroup) close() {
	g.fd.Close()
	if removeGroup(g.dir) != nil {
		g.owner.mu.Lock()
		g.owner.leftover = append(g.owner.leftover, g.dir)
		g.owner.mu.Unlock()
	}
	g.owner.sweep()
}

func populated(dir string) bool {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	return err == nil && flatKey(b, "populated") != 0
}

// flatKey reads a number from a cgroup file of "key value" lines.
func flatKey(b []byte, key string) int {
	s := bufio.NewScanner(bytes.NewReader(b))
	for s.Scan() {
		k, v, _ := strings.Cut(s.Text(), " ")
		if k == key {
			n, _ := strconv.Atoi(v)
			return n
		}
	}
	return 0
}

// writeFile writes to a file that exists already, as those of the kernel do.
func writeFile(path, content string) error {
	fd, err := syscall.Open(path, syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	_, err = syscall.Write(fd, []byte(content))
	syscall.Close(fd)
	if err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}
