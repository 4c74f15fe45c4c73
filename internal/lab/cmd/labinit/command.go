package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/internal/lab/wire"
)

// outputGrace is how long output may still come after a command has ended while something it started holds its pipes.
const outputGrace = time.Second

// command is one program that the host asked for, in a session and a control group of its own.
type command struct {
	group string
	stdin chan []byte // nil: the command has no input
	// inputOver says that stdin is closed.
	inputOver bool
}

// start runs spec and sends what becomes of it under id. It does not wait.
func start(id uint32, spec wire.Command, out *wire.Writer) *command {
	c := &command{group: filepath.Join("/sys/fs/cgroup", fmt.Sprintf("lab-%d", id))}
	if spec.Stdin {
		c.stdin = make(chan []byte, 64)
	}
	go func() {
		outcome := c.run(id, spec, out)
		if err := out.WriteJSON(wire.Exit, id, outcome); err != nil {
			fmt.Fprintf(os.Stderr, "labinit: %v\n", err)
		}
	}()
	return c
}

func (c *command) run(id uint32, spec wire.Command, out *wire.Writer) wire.Outcome {
	group, err := c.openGroup()
	if err != nil {
		return c.refuse(err)
	}
	defer group.Close()
	if len(spec.Argv) == 0 {
		return c.refuse(errors.New("start command: nothing to run"))
	}
	cmd := exec.Command(spec.Argv[0], spec.Argv[1:]...)
	cmd.Env = append(machineEnv(), spec.Env...)
	cmd.Dir = spec.Dir
	if cmd.Dir == "" {
		cmd.Dir = "/root"
	}
	cmd.Stdout, cmd.Stderr = out.Stream(wire.Stdout, id), out.Stream(wire.Stderr, id)
	cmd.WaitDelay = outputGrace
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, UseCgroupFD: true, CgroupFD: int(group.Fd())}
	pipe, err := c.connectStdin(cmd)
	if err != nil {
		return c.refuse(err)
	}
	if err := cmd.Start(); err != nil {
		return c.refuse(err)
	}
	if c.stdin != nil {
		go feed(c.stdin, pipe)
	}
	outcome := outcomeOf(cmd, cmd.Wait())
	outcome.Left = c.left()
	if spec.KillLeft && len(outcome.Left) > 0 {
		c.kill()
	}
	return outcome
}

// refuse is the outcome of a command that never ran.
func (c *command) refuse(err error) wire.Outcome {
	if c.stdin != nil {
		go feed(c.stdin, nil)
	}
	return wire.Outcome{Error: err.Error()}
}

// connectStdin gives the command a pipe when the host sends input; the caller has it fed with feed.
func (c *command) connectStdin(cmd *exec.Cmd) (io.WriteCloser, error) {
	if c.stdin == nil {
		return nil, nil
	}
	return cmd.StdinPipe()
}

// feed passes input on until it ends. A command may end without reading all, or never have started: what is left is
// swallowed, so that the reader of the port never waits for it.
func feed(pieces <-chan []byte, pipe io.WriteCloser) {
	broken := pipe == nil
	for p := range pieces {
		if !broken {
			_, err := pipe.Write(p)
			broken = err != nil
		}
	}
	if pipe != nil {
		pipe.Close()
	}
}

// input and inputEnd are called by the reader of the port only.
func (c *command) input(p []byte) {
	if c.stdin != nil && !c.inputOver {
		c.stdin <- p
	}
}

func (c *command) inputEnd() {
	if c.stdin != nil && !c.inputOver {
		c.inputOver = true
		close(c.stdin)
	}
}

func (c *command) openGroup() (*os.File, error) {
	if err := os.Mkdir(c.group, 0o755); err != nil {
		return nil, err
	}
	return os.Open(c.group)
}

// kill ends the command and all that it started, wherever they put themselves short of another control group.
func (c *command) kill() {
	if err := os.WriteFile(filepath.Join(c.group, "cgroup.kill"), []byte("1"), 0); err != nil {
		fmt.Fprintf(os.Stderr, "labinit: %v\n", err)
	}
}

// left names the live processes of the command's control group, and of those below it.
func (c *command) left() (names []string) {
	// What cannot be read is gone.
	_ = filepath.WalkDir(c.group, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Name() != "cgroup.procs" {
			return nil
		}
		procs, err := os.ReadFile(path)
		if err != nil {
			return nil
		}
		for _, pid := range strings.Fields(string(procs)) {
			if name := liveName(pid); name != "" {
				names = append(names, pid+" "+name)
			}
		}
		return nil
	})
	return names
}

// liveName is a process's command line, or "" when it has ended.
func liveName(pid string) string {
	// "pid (name) state …": the name may hold anything, the rest holds no parenthesis.
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return ""
	}
	end := bytes.LastIndex(stat, []byte(") "))
	if end < 0 || strings.ContainsRune("ZX", rune(stat[end+2])) {
		return "" // a zombie
	}
	line, err := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
	if err != nil || len(line) == 0 { // in the middle of execve it has none
		_, name, _ := bytes.Cut(stat[:end], []byte("("))
		return string(name)
	}
	return strings.TrimSpace(strings.ReplaceAll(string(line), "\x00", " "))
}

func outcomeOf(cmd *exec.Cmd, err error) wire.Outcome {
	// Output that something else still holds open is no failure of the command.
	if err == nil || errors.Is(err, exec.ErrWaitDelay) {
		return wire.Outcome{Code: cmd.ProcessState.ExitCode()}
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return wire.Outcome{Error: err.Error()}
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return wire.Outcome{Signal: int(status.Signal())}
	}
	return wire.Outcome{Code: exit.ExitCode()}
}
