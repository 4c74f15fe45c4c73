package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

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

// NoteUse has the VM's working set recorded, if that is one of all that it does and is
// wanted.
func (c *Client) NoteUse(ctx context.Context) error {
	_, err := c.simple(ctx, opNoteUse)
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
}

// Reset puts the VM back and returns how long that took, up to the guest agent's
// confirmation of the identity. The VM process notes its generation for ReadGeneration
// then, also if nobody waits for the answer any more.
func (c *Client) Reset(ctx context.Context, r ResetConfig) (time.Duration, error) {
	var t table
	form := resetForm{Identity: r.Identity, ReadyTimeout: r.ReadyTimeout}
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
// tops are the new top layers of its disks, nil for read-only ones; they stay the
// caller's. The caller closes the checkpoint.
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

// Compact merges layers of the VM's disks into files, empty ones as for a checkpoint's
// tops, which stay the caller's.
func (c *Client) Compact(ctx context.Context, files []*os.File) error {
	var t table
	_, answered, err := c.call(ctx, request{Op: opCompact, Tops: t.addAll(files)}, t.files)
	linux.CloseFiles(answered...)
	return err
}
