package agent

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// procfs is what the kernel says of all processes. It is a file system of its own
// where that can be had: what a program has mounted over /proc, or over a part of
// it, hides nothing. One goroutine may use it.
type procfs struct {
	fd int
	// buf has what was read last: files of the kernel are small, and there are many.
	buf []byte
	// kernel is the process of which all threads of the kernel are, 0 if it is not known.
	kernel int
}

// firstRead is enough for most files.
const firstRead = 4 << 10

func openProcfs() (*procfs, error) {
	fd, err := mountProcfs()
	if err != nil { // before Linux 5.2, or not allowed
		fd, err = unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open /proc: %w", err)
	}
	p := &procfs{fd: fd, buf: make([]byte, firstRead)}
	// Numbers of another PID namespace would be those of other processes here.
	if self := p.link("self"); self != strconv.Itoa(os.Getpid()) {
		p.close()
		return nil, fmt.Errorf("/proc is of another PID namespace: it has this process as %q", self)
	}
	p.findKernel()
	return p, nil
}

// kthreadd is the process that starts all threads of the kernel, in the first PID
// namespace.
const kthreadd = 2

func (p *procfs) findKernel() {
	b, err := p.read(strconv.Itoa(kthreadd)+"/stat", maxStat)
	if err != nil {
		return
	}
	if s, err := parseStat(b); err == nil && s.flags&kernelThread != 0 {
		p.kernel = kthreadd
	}
}

// ofKernel reports whether a process is sure to be a thread of the kernel: it has
// kthreadd's table of descriptors, which no program can come to share. Most numbers are
// of such threads, and this costs a fraction of what reading about one does.
func (p *procfs) ofKernel(pid int) bool {
	const files = 2 // KCMP_FILES of the kernel's include/uapi/linux/kcmp.h
	if p.kernel == 0 {
		return false
	}
	order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(p.kernel), uintptr(pid), files, 0, 0, 0)
	return errno == 0 && order == 0
}

// mountProcfs makes a mount that is in no directory tree.
func mountProcfs() (int, error) {
	context, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return -1, err
	}
	return unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
}

func (p *procfs) close() { unix.Close(p.fd) }

func (p *procfs) open(name string) (*os.File, error) {
	fd, err := unix.Openat(p.fd, name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: "/proc/" + name, Err: err}
	}
	return os.NewFile(uintptr(fd), "/proc/"+name), nil
}

// read returns the first bytes of a file. They stay until the next call.
func (p *procfs) read(name string, limit int) ([]byte, error) {
	fd, err := unix.Openat(p.fd, name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	for n := 0; ; {
		if n == len(p.buf) {
			p.buf = append(p.buf, make([]byte, len(p.buf))...)
		}
		m, err := unix.Read(fd, p.buf[n:min(len(p.buf), limit)])
		if err == unix.EINTR {
			continue
		}
		if err != nil { // such as ESRCH of a process that has just ended
			return nil, err
		}
		if n += m; m == 0 || n == limit {
			return p.buf[:n], nil
		}
	}
}

// maxStat is more than any stat file has.
const maxStat = 4096

// pids lists all numbers of processes, also of zombies and of the kernel's threads.
func (p *procfs) pids() ([]int, error) {
	names, err := p.names(".")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// names lists a directory of the file system, or any one by its absolute path.
func (p *procfs) names(dir string) ([]string, error) {
	fd, err := unix.Openat(p.fd, dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var names []string
	for {
		n, err := unix.ReadDirent(fd, p.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return names, err
		}
		_, _, names = unix.ParseDirent(p.buf[:n], -1, names)
	}
}

// stat is what of a stat file is of interest, proc(5).
type stat struct {
	name   string
	state  byte
	parent int
	flags  uint64
	start  uint64 // clock ticks since boot
}

// kernelThread is PF_KTHREAD of the kernel's include/linux/sched.h.
const kernelThread = 0x00200000

func parseStat(b []byte) (s stat, err error) {
	// The name may have any byte, so it ends with the last parenthesis.
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return s, errors.New("stat file without a name")
	}
	s.name = string(b[open+1 : end])
	f := strings.Fields(string(b[end+1:])) // from field 3, the state, on
	if len(f) < 20 || len(f[0]) != 1 {
		return s, fmt.Errorf("stat file with %d fields", len(f)+2)
	}
	s.state = f[0][0]
	if s.parent, err = strconv.Atoi(f[1]); err == nil {
		if s.flags, err = strconv.ParseUint(f[6], 10, 64); err == nil {
			s.start, err = strconv.ParseUint(f[19], 10, 64)
		}
	}
	return s, err
}

// dead reports whether a state is of a thread that will never run again.
func dead(state byte) bool { return state == 'Z' || state == 'X' || state == 'x' }

// errNoProcess is for one that has ended, or is the kernel's.
var errNoProcess = errors.New("no process")

// process describes a process, errNoProcess if it has ended or is a thread of the
// kernel.
func (p *procfs) process(pid int) (proto.ProcessInfo, error) {
	if p.ofKernel(pid) {
		return proto.ProcessInfo{}, errNoProcess
	}
	dir := strconv.Itoa(pid)
	b, err := p.read(dir+"/stat", maxStat)
	if err != nil {
		return proto.ProcessInfo{}, errNoProcess
	}
	s, err := parseStat(b)
	switch {
	case err != nil:
		return proto.ProcessInfo{}, err
	case s.flags&kernelThread != 0, dead(s.state) && !p.lives(pid):
		return proto.ProcessInfo{}, errNoProcess
	}
	info := proto.ProcessInfo{PID: pid, Parent: s.parent, Start: s.start, Name: proto.Text(s.name)}
	info.Program, info.Inode = p.program(dir)
	return info, nil
}

// lives reports whether a process whose first thread has ended has others.
func (p *procfs) lives(pid int) bool {
	dir := strconv.Itoa(pid) + "/task"
	threads, _ := p.names(dir)
	for _, t := range threads {
		b, err := p.read(dir+"/"+t+"/stat", maxStat)
		if err != nil {
			continue
		}
		if s, err := parseStat(b); err == nil && !dead(s.state) {
			return true
		}
	}
	return false
}

// program is the executable file of a process, wherever it is or was.
func (p *procfs) program(dir string) (proto.Text, uint64) {
	path := p.link(dir + "/exe")
	if path == "" {
		return "", 0
	}
	var st unix.Stat_t
	_ = unix.Fstatat(p.fd, dir+"/exe", &st, 0) // 0 if it cannot be had
	return proto.Text(strings.TrimSuffix(path, " (deleted)")), st.Ino
}

// link is where a link leads, empty if there is none.
func (p *procfs) link(name string) string {
	n, err := unix.Readlinkat(p.fd, name, p.buf)
	if err != nil {
		return ""
	}
	return string(p.buf[:n])
}

const (
	maxArgsBytes = 512
	maxArgsShown = 16
)

// args is the beginning of a process's arguments.
func (p *procfs) args(pid int) []proto.Text {
	b, _ := p.read(strconv.Itoa(pid)+"/cmdline", maxArgsBytes)
	b = bytes.TrimSuffix(b, []byte{0})
	if len(b) == 0 {
		return nil
	}
	var args []proto.Text
	for a := range bytes.SplitSeq(b, []byte{0}) {
		if len(args) == maxArgsShown {
			break
		}
		args = append(args, proto.Text(a))
	}
	return args
}
