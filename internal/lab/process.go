package lab

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// process is a running emulator.
type process struct {
	cmd    *exec.Cmd
	stderr tail
	done   chan struct{} // closed when it has ended
	err    error         // how; valid after done

	stopping atomic.Bool // stop was called
}

// startProcess starts the emulator so that it dies with this process, however that ends.
func startProcess(program string, args []string, env []string, files []*os.File) (*process, error) {
	p := &process{cmd: exec.Command(program, args...), done: make(chan struct{})}
	p.cmd.Stderr = &p.stderr
	p.cmd.ExtraFiles = files
	p.cmd.Env = env
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid:   true, // a terminal's Ctrl-C is for us; we end it
		Pdeathsig: syscall.SIGKILL,
	}
	started := make(chan error)
	go func() {
		// The parent-death signal is tied to the thread that forked: it has to live as long as the child.
		runtime.LockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start emulator: %w", err)
	}
	return p, nil
}

// stop ends the process and waits until it is gone.
func (p *process) stop() {
	p.stopping.Store(true)
	_ = p.cmd.Process.Kill() // an error says that it has ended already
	<-p.done
}

// said is what the process complained of and how it ended, without the warnings that every start has.
func (p *process) said() string {
	var lines []string
	for _, line := range strings.Split(p.stderr.String(), "\n") {
		if line != "" && !strings.Contains(line, "TCG doesn't support requested feature") {
			lines = append(lines, "emulator: "+line)
		}
	}
	select {
	case <-p.done:
		if p.err != nil {
			lines = append(lines, "emulator: "+p.err.Error())
		}
		if p.killed() {
			lines = append(lines, "emulator: not killed by the lab; a machine that is out of memory does that (LAB_MEM asks for less)")
		}
	default:
	}
	return strings.Join(lines, "\n")
}

// killed says that somebody else ended the process, once it has ended.
func (p *process) killed() bool {
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL && !p.stopping.Load()
}

// tail keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

const tailSize = 16 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - tailSize; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.buf.String()
}

// socketPair returns two connected stream sockets, ours and the emulator's.
func socketPair(name string) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("create socket pair for %s: %w", name, err)
	}
	// Non-blocking on our side only: closing ours then wakes its reader.
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, fmt.Errorf("prepare socket pair for %s: %w", name, err)
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name+" (emulator)"), nil
}
