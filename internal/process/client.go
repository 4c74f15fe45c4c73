package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// LaunchConfig says what a VM process starts from. Files stay the caller's.
type LaunchConfig struct {
	// Command is the program and arguments of the VM process, which calls Serve.
	Command []string
	// Directory is the VM's own directory, which exists and is empty of sockets.
	Directory string
	// KVM is the open /dev/kvm.
	KVM *os.File
	// Kernel and Initrd for a cold boot; otherwise Checkpoint has a state.
	Kernel, Initrd *os.File
	// Checkpoint has the shape and the layers in both cases.
	Checkpoint *machine.Checkpoint
	// Tops are the disks' empty top layers, nil for read-only disks.
	Tops         []*os.File
	Identity     machine.Identity
	ReadyTimeout time.Duration
	// Attached makes the VM end with the calling process, however that ends, or
	// when Release is called on the result.
	Attached bool
	// Launched, if set, is called with the process before the start message
	// goes out, so that it is on record before it is a VM. An error ends it.
	Launched func(p *linux.Process) error
}

// Launch starts a VM process and returns when its guest is ready. When it fails,
// or ctx ends before, the process is gone.
func Launch(ctx context.Context, c LaunchConfig) (*Started, error) {
	launcher, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	keep := false
	defer func() {
		if !keep {
			launcher.Close()
		}
	}()
	p, err := spawn(c, theirs)
	theirs.Close()
	if err != nil {
		return nil, err
	}
	defer p.Close()
	started, err := c.start(ctx, launcher, p)
	if err != nil {
		// Not an error if it is gone already.
		_ = p.Signal(syscall.SIGKILL)
		return nil, err
	}
	if keep = c.Attached; keep {
		started.launcher = launcher
	}
	return started, nil
}

// Release ends an attached VM. For others it does nothing. It is idempotent.
func (s *Started) Release() {
	if s.launcher != nil {
		s.launcher.Close()
	}
}

// spawn starts the process in a session of its own: it outlives the caller and
// does not hear the signals of the caller's terminal.
func spawn(c LaunchConfig, socket *os.File) (*linux.Process, error) {
	log, err := os.OpenFile(filepath.Join(c.Directory, "process.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start vm process: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(c.Command[0], c.Command[1:]...)
	cmd.Dir = "/"
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{socket}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start vm process: %w", err)
	}
	p, err := linux.OpenProcess(cmd.Process.Pid, 0)
	if err != nil {
		cmd.Process.Kill()
		cmd.Wait()
		err = fmt.Errorf("start vm process: %w", err)
		if errors.Is(err, linux.ErrProcessGone) { // it died before we looked
			return nil, failure.As(failure.VMProcessGone, err)
		}
		return nil, err
	}
	// Whoever lives on with many VMs collects each of them when it ends.
	go cmd.Wait()
	return p, nil
}

func (c *LaunchConfig) start(ctx context.Context, launcher *conn, p *linux.Process) (*Started, error) {
	if c.Launched != nil {
		if err := c.Launched(p); err != nil {
			return nil, err
		}
	}
	if err := c.sendStart(launcher); err != nil {
		return nil, err
	}
	resp, files, err := receive(ctx, launcher)
	linux.CloseFiles(files...)
	if err != nil {
		return nil, err
	}
	if resp.Started == nil {
		return nil, failure.New(failure.Internal, "vm process gave no answer to start")
	}
	resp.Started.Timeline.End(phaseAnswer)
	return resp.Started, nil
}

func (c *LaunchConfig) sendStart(launcher *conn) error {
	control, err := listen("unixpacket", filepath.Join(c.Directory, ControlSocket))
	if err != nil {
		return fmt.Errorf("create control socket: %w", err)
	}
	defer control.Close()
	vsock, err := listen("unix", filepath.Join(c.Directory, VsockSocket))
	if err != nil {
		return fmt.Errorf("create vsock socket: %w", err)
	}
	defer vsock.Close()
	directory, err := os.Open(c.Directory)
	if err != nil {
		return err
	}
	defer directory.Close()

	console, err := os.OpenFile(filepath.Join(c.Directory, ConsoleFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()

	var t table
	checkpoint, state, err := t.addCheckpoint(c.Checkpoint)
	if err != nil {
		return err
	}
	defer linux.CloseFiles(state)
	form := startForm{
		Control:      t.add(control),
		Vsock:        t.add(vsock),
		Directory:    t.add(directory),
		Console:      t.add(console),
		KVM:          t.add(c.KVM),
		Kernel:       t.add(c.Kernel),
		Initrd:       t.add(c.Initrd),
		Checkpoint:   checkpoint,
		Identity:     c.Identity,
		ReadyTimeout: c.ReadyTimeout,
		Attached:     c.Attached,
	}
	form.Tops = t.addAll(c.Tops)
	return sent(launcher.send(request{Op: opStart, Start: &form}, t.files))
}

// sent gives an error of sending its code: the process may be gone already.
func sent(err error) error {
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		return failure.New(failure.VMProcessGone, "vm process ended without an answer: %w", err)
	}
	return err
}

// receive waits for an answer, for as long as ctx allows. An answer with an
// error is an error.
func receive(ctx context.Context, c *conn) (*response, []*os.File, error) {
	stop := context.AfterFunc(ctx, func() { c.socket.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var resp response
	files, err := c.receive(&resp)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, nil, failure.As(failure.Cancelled, context.Cause(ctx))
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return nil, nil, failure.New(failure.VMProcessGone, "vm process ended without an answer: %w", err)
	case err != nil:
		return nil, nil, err
	case resp.Error != nil:
		linux.CloseFiles(files...)
		return nil, nil, resp.Error
	}
	return &resp, files, nil
}

// Client steers a running VM process. Its methods may be called one at a time.
type Client struct{ conn *conn }

// Dial connects to the control socket in a VM's directory.
func Dial(ctx context.Context, directory string) (*Client, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unixpacket", filepath.Join(directory, ControlSocket))
	if err != nil {
		return nil, failure.New(failure.VMProcessGone, "connect to vm process: %w", err)
	}
	return &Client{conn: newConn(c.(*net.UnixConn))}, nil
}

// Close closes the connection; the VM goes on.
func (c *Client) Close() error { return c.conn.Close() }

func (c *Client) call(ctx context.Context, req request, files []*os.File) (*response, []*os.File, error) {
	if err := sent(c.conn.send(req, files)); err != nil {
		return nil, nil, err
	}
	return receive(ctx, c.conn)
}

// simple makes a call whose answer has no files.
func (c *Client) simple(ctx context.Context, op string) (*response, error) {
	resp, files, err := c.call(ctx, request{Op: op}, nil)
	linux.CloseFiles(files...)
	return resp, err
}

// Status returns what the VM is doing.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	resp, err := c.simple(ctx, opStatus)
	if err != nil {
		return nil, err
	}
	if resp.Status == nil {
		return nil, failure.New(failure.Internal, "vm process gave no status")
	}
	return resp.Status, nil
}

// Pause stops the guest; pausing twice is the same as once.
func (c *Client) Pause(ctx context.Context) error {
	_, err := c.simple(ctx, opPause)
	return err
}

// Resume lets a paused guest go on.
func (c *Client) Resume(ctx context.Context) error {
	_, err := c.simple(ctx, opResume)
	return err
}

// Kill ends the guest. The process ends soon after the answer.
func (c *Client) Kill(ctx context.Context) error {
	_, err := c.simple(ctx, opKill)
	return err
}

// ResetConfig says what a VM is reset to. Files and layers stay the caller's.
type ResetConfig struct {
	// To is what the VM goes back to, nil for what it came from.
	To *machine.Checkpoint
	// Tops are the disks' new top layers, nil for read-only disks.
	Tops         []*os.File
	Identity     machine.Identity
	ReadyTimeout time.Duration
	// Life is put on record when the guest has confirmed its identity, for
	// ReadLife, also if nobody waits for the answer any more.
	Life any
}

// Reset puts the VM back and returns how long that took, up to the guest agent's
// confirmation of the identity.
func (c *Client) Reset(ctx context.Context, r ResetConfig) (time.Duration, error) {
	var t table
	form := resetForm{Identity: r.Identity, ReadyTimeout: r.ReadyTimeout}
	var err error
	if form.Life, err = json.Marshal(r.Life); err != nil {
		return 0, fmt.Errorf("reset vm: %w", err)
	}
	if r.To != nil {
		checkpoint, state, err := t.addCheckpoint(r.To)
		if err != nil {
			return 0, err
		}
		defer linux.CloseFiles(state)
		form.Checkpoint = &checkpoint
	}
	req := request{Op: opReset, Reset: &form, Tops: t.addAll(r.Tops)}
	resp, files, err := c.call(ctx, req, t.files)
	linux.CloseFiles(files...)
	if err != nil {
		return 0, err
	}
	return resp.Reset, nil
}

// Checkpoint freezes the VM for a moment and returns what a clone begins from.
// tops are the new top layers of its disks, nil for read-only ones; they stay
// the caller's. The caller closes the checkpoint.
func (c *Client) Checkpoint(ctx context.Context, tops []*os.File) (*machine.Checkpoint, error) {
	var t table
	req := request{Op: opCheckpoint, Tops: t.addAll(tops)}
	resp, files, err := c.call(ctx, req, t.files)
	if err != nil {
		return nil, err
	}
	claimed := claims{files: files}
	defer claimed.close()
	if resp.Checkpoint == nil {
		return nil, failure.New(failure.Internal, "vm process gave no checkpoint")
	}
	checkpoint, err := claimed.takeCheckpoint(*resp.Checkpoint)
	if err != nil {
		checkpoint.Close()
		return nil, fmt.Errorf("receive checkpoint: %w", err)
	}
	return checkpoint, nil
}
