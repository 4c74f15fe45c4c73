package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ErrProcessGone says that the process meant is not running any more. Its
// number may belong to another one by now.
var ErrProcessGone = errors.New("process is gone")

// StartTime returns when process pid started, in clock ticks since boot (field
// 22 of /proc/<pid>/stat). Together with the boot id and the number it names a
// process for good. ErrProcessGone if there is no such process.
func StartTime(pid int) (uint64, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, fmt.Errorf("read start time (%d): %w", pid, ErrProcessGone)
	}
	if err != nil {
		return 0, fmt.Errorf("read start time (%d): %w", pid, err)
	}
	ticks, err := parseStartTime(stat)
	if err != nil {
		return 0, fmt.Errorf("read start time (%d): %w", pid, err)
	}
	return ticks, nil
}

func parseStartTime(stat []byte) (uint64, error) {
	// The second field is the program's name in parentheses, with any byte in
	// it, so fields are counted from the last closing one.
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, errors.New("malformed stat line")
	}
	fields := bytes.Fields(stat[end+1:]) // starts with field 3
	if len(fields) < 20 {
		return 0, errors.New("short stat line")
	}
	return strconv.ParseUint(string(fields[22-3]), 10, 64)
}

// BootID returns the random id of this boot. Process start times of different
// boots cannot be compared.
func BootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

// Process is a handle (pidfd) on one particular process: unlike a number it
// never comes to mean another one. Safe for concurrent use.
type Process struct {
	pid   int
	start uint64
	file  *os.File
}

// OpenProcess opens process pid, if it is still the one that started at start
// (from StartTime); zero takes whichever process has the number now. If the
// process has ended, or the number has passed to another one, the error is
// ErrProcessGone.
func OpenProcess(pid int, start uint64) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.EINVAL) && pid > 0 { // flag unknown before 5.10
		fd, err = unix.PidfdOpen(pid, 0)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
	}
	if errors.Is(err, unix.ESRCH) {
		err = ErrProcessGone
	}
	if err != nil {
		return nil, fmt.Errorf("open process (%d): %w", pid, err)
	}
	p := &Process{pid: pid, file: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid))}
	if err := p.identify(start); err != nil {
		p.Close()
		return nil, fmt.Errorf("open process (%d): %w", pid, err)
	}
	return p, nil
}

func (p *Process) identify(want uint64) error {
	got, err := StartTime(p.pid)
	if err != nil {
		return err
	}
	// Only if the process still runs now was the stat line read above its own.
	running, err := p.Running()
	if err != nil {
		return err
	}
	if !running || want != 0 && got != want {
		return ErrProcessGone
	}
	p.start = got
	return nil
}

// PID is the process's number.
func (p *Process) PID() int { return p.pid }

// Start is when it started, in clock ticks since boot.
func (p *Process) Start() uint64 { return p.start }

// Running reports whether the process has not ended yet. A zombie has ended.
func (p *Process) Running() (bool, error) {
	running := true
	err := p.control(func(fd int) error {
		ended, err := readable(fd)
		running = !ended
		return err
	})
	return running, err
}

// Signal sends a signal. ErrProcessGone if the process was reaped.
func (p *Process) Signal(signal unix.Signal) error {
	err := p.control(func(fd int) error { return unix.PidfdSendSignal(fd, signal, nil, 0) })
	if errors.Is(err, unix.ESRCH) {
		err = ErrProcessGone
	}
	if err != nil {
		return fmt.Errorf("signal process (%d): %w", p.pid, err)
	}
	return nil
}

// Wait returns nil when the process has ended, or the context's error. It does
// not reap the process, and works on processes that are not our children.
func (p *Process) Wait(ctx context.Context) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for process (%d): %w", p.pid, err)
	}
	stop := context.AfterFunc(ctx, func() { p.file.SetReadDeadline(time.Unix(1, 0)) })
	defer func() {
		stop()
		p.file.SetReadDeadline(time.Time{})
	}()
	var polled error
	err = raw.Read(func(fd uintptr) bool {
		ended, err := readable(int(fd))
		polled = err
		return ended || err != nil
	})
	if ctx.Err() != nil && err != nil {
		return ctx.Err()
	}
	if err = errors.Join(err, polled); err != nil {
		return fmt.Errorf("wait for process (%d): %w", p.pid, err)
	}
	return nil
}

// Close closes the handle; idempotent. The process is left alone.
func (p *Process) Close() error {
	if err := p.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("close process (%d): %w", p.pid, err)
	}
	return nil
}

func (p *Process) control(f func(fd int) error) error {
	raw, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

func readable(fd int) (bool, error) {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n := 0
	err := ignoringEINTR(func() (err error) { n, err = unix.Poll(fds, 0); return err })
	return n > 0, err
}
