package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// procfs is what the kernel says of all processes. It is a file system of its own
// where that can be had: what a program has mounted over /proc, or over a part of
// it, hides nothing.
type procfs struct{ fd int }

func openProcfs() (*procfs, error) {
	fd, err := mountProcfs()
	if err != nil { // before Linux 5.2, or not allowed
		fd, err = unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open /proc: %w", err)
	}
	p := &procfs{fd}
	// Numbers of another PID namespace would be those of other processes here.
	if self := p.link("self"); self != strconv.Itoa(os.Getpid()) {
		p.close()
		return nil, fmt.Errorf("/proc is of another PID namespace: it has this process as %q", self)
	}
	return p, nil
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

// read returns the first bytes of a file.
func (p *procfs) read(name string, limit int64) ([]byte, error) {
	f, err := p.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
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

func (p *procfs) names(dir string) ([]string, error) {
	f, err := p.open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
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
	target := make([]byte, 4096)
	n, err := unix.Readlinkat(p.fd, name, target)
	if err != nil {
		return ""
	}
	return string(target[:n])
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
