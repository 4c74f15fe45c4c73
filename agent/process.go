package agent

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/forkvm/forkvm/agent/proto"
)

// process is a running command.
type process struct {
	agent *Agent
	pid   int
	group *cgroup // nil: only the process group holds its descendants
	exit  <-chan exitStatus
}

// launch starts a command with the given descriptors as its 0, 1 and 2, in a
// session and, where there are cgroups, in a group of its own. With terminal the
// descriptors are a terminal, which becomes the session's. The error is a
// *refusal or a *proto.Error.
func (a *Agent) launch(c command, files []uintptr, terminal bool) (*process, error) {
	p := &process{agent: a}
	if a.groups != nil {
		group, err := a.groups.create()
		if err != nil {
			e := failure(proto.CodeResourceExhausted, "%v", err)
			e.Retryable = true
			return nil, e
		}
		p.group = group
	}
	err := p.start(c, files, terminal)
	if p.group != nil && (errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EBADF)) {
		// No clone into a cgroup (before Linux 5.7).
		p.dropGroup()
		err = p.start(c, files, terminal)
	}
	if err != nil {
		p.dropGroup()
		return nil, startError(c, err)
	}
	return p, nil
}

func (p *process) dropGroup() {
	if p.group != nil {
		p.group.close()
		p.group = nil
	}
}

func (p *process) start(c command, files []uintptr, terminal bool) error {
	attr := &syscall.ProcAttr{
		Dir: c.dir, Env: c.env, Files: files,
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: terminal, Credential: c.credential},
	}
	if p.group != nil {
		attr.Sys.UseCgroupFD = true
		attr.Sys.CgroupFD = int(p.group.fd.Fd())
	}
	var err error
	p.pid, p.exit, err = p.agent.reaper.start(func() (int, *exitStatus, error) {
		if !p.agent.protected && len(c.limits) == 0 {
			pid, err := syscall.ForkExec(c.path, c.argv, attr)
			return pid, nil, err
		}
		pid, ended, err := p.startStopped(c, attr)
		if !errors.Is(err, errNotTraced) {
			return pid, ended, err
		}
		if len(c.limits) > 0 {
			return 0, nil, failure(proto.CodeUnsupported, "resource limits cannot be set in this guest, which forbids tracing")
		}
		// The command runs a moment with our protection.
		attr.Sys.Ptrace = false
		if pid, err = syscall.ForkExec(c.path, c.argv, attr); err == nil {
			unprotect(pid)
			p.unprotectDescendants()
		}
		return pid, nil, err
	})
	return err
}

// errNotTraced: tracing is forbidden in this guest (Yama).
var errNotTraced = errors.New("tracing is forbidden")

// startStopped starts a command whose out-of-memory score is the normal one and
// whose limits hold from its first instruction on, although it inherits ours: the
// command stops where a traced process stops after execve, gets them and goes on.
// Writing the score later would leave the command, or a child that it has had
// by then, protected from the kernel's choice for ever.
func (p *process) startStopped(c command, attr *syscall.ProcAttr) (int, *exitStatus, error) {
	// The tracer is a thread, not a process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	attr.Sys.Ptrace = true
	pid, err := syscall.ForkExec(c.path, c.argv, attr)
	if errors.Is(err, syscall.EPERM) {
		return 0, nil, errNotTraced
	}
	if err != nil {
		return 0, nil, err
	}
	var ws syscall.WaitStatus
	if _, err := wait4(pid, &ws, 0); err != nil {
		syscall.Kill(pid, syscall.SIGKILL)
		return 0, nil, err
	}
	if ws.Exited() || ws.Signaled() {
		ended := toExit(ws)
		return pid, &ended, nil
	}
	if p.agent.protected {
		unprotect(pid)
	}
	if err := setLimits(pid, c.limits); err != nil {
		syscall.Kill(pid, syscall.SIGKILL)
		_, _ = wait4(pid, &ws, 0) // it was ours alone
		return 0, nil, err
	}
	if err := syscall.PtraceDetach(pid); err != nil {
		// Killed since then; its end is still to be waited for.
		syscall.Kill(pid, syscall.SIGKILL)
	}
	return pid, nil, nil
}

const scoreFile = "oom_score_adj"

// isProtected tells whether this process is less likely than others to be
// killed when memory runs out.
func isProtected() bool {
	b, err := os.ReadFile("/proc/self/" + scoreFile)
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

// Protect makes this process the last one that the kernel kills for want of
// memory. Commands do not inherit it.
func Protect() error { return writeFile("/proc/self/"+scoreFile, "-1000") }

func unprotect(pid int) { writeFile(filepath.Join("/proc", strconv.Itoa(pid), scoreFile), "0") }

// unprotectDescendants reaches children that were born before their parent was
// unprotected: when a pass finds none, there are none.
func (p *process) unprotectDescendants() {
	if p.group == nil {
		return
	}
	for seen := map[int]bool{p.pid: true}; ; {
		again := false
		for _, pid := range p.group.processes() {
			if !seen[pid] {
				seen[pid], again = true, true
				unprotect(pid)
			}
		}
		if !again {
			return
		}
	}
}

// kill ends the command and all its descendants that are in reach.
func (p *process) kill() {
	if p.group != nil {
		p.group.kill()
	}
	p.signal(syscall.SIGKILL)
}

// signal reaches the main process and its process group, until the main
// process has ended.
func (p *process) signal(s syscall.Signal) { p.agent.reaper.signal(p.pid, s) }

// signalAll reaches every process of the command that signal or the cgroup does.
func (p *process) signalAll(s syscall.Signal) {
	if s == syscall.SIGKILL {
		p.kill()
		return
	}
	if p.group == nil {
		p.signal(s)
		return
	}
	for _, pid := range p.group.processes() {
		syscall.Kill(pid, s)
	}
}

func (p *process) containment() string {
	if p.group != nil {
		return proto.ContainmentCgroup
	}
	return proto.ContainmentProcessGroup
}
