package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Detached is a command that belongs to no connection, as the guest agent knows
// it: while it runs, and for an hour or 256 others after its end.
type Detached struct {
	// ID is its OperationID.
	ID string
	// Args is the beginning of its argument vector.
	Args []string
	PID  int
	// Running: it has not ended. Otherwise there is a Result.
	Running bool
	// Age is the time since its start.
	Age         time.Duration
	Containment string
	// What it has written so far, and what of that the guest agent keeps.
	Stdout, Stderr Kept
	Result         *Result
}

// Kept says what a guest agent keeps of a stream: the bytes from From up to Bytes,
// which is how many there were. Lost is how many of those that Attach was asked for
// were not kept any more.
type Kept struct{ From, Bytes, Lost int64 }

func detached(s proto.CommandStatus, result *Result) Detached {
	return Detached{
		ID: s.ID, Args: proto.Strings(s.Args), PID: s.PID, Running: s.State == proto.CommandRunning,
		Age: time.Duration(s.AgeMS) * time.Millisecond, Containment: s.Containment,
		Stdout: Kept{From: s.Stdout.KeptFrom, Bytes: s.Stdout.Bytes}, Stderr: Kept{From: s.Stderr.KeptFrom, Bytes: s.Stderr.Bytes},
		Result: result,
	}
}

// commandStatus is the wire's form with the result in ours.
type commandStatus struct {
	proto.CommandStatus
	Result *Result `json:"result"`
}

// Detach starts a command and leaves it running. Its streams are kept by the guest
// agent, the newest megabyte of each if there is room; Stdout and Stderr of cmd do
// not count, and it has no Stdin. Without an OperationID it gets one. A command that
// could not be invoked has ended, and its Result says why.
func (c *Client) Detach(ctx context.Context, cmd Command) (Detached, error) {
	if cmd.OperationID == "" {
		var b [6]byte
		rand.Read(b[:]) // never fails (crypto/rand)
		cmd.OperationID = hex.EncodeToString(b[:])
	}
	request, _ := cmd.request()
	request.Detach = true
	request.Stdout, request.Stderr = proto.OutputStream, proto.OutputStream
	var status commandStatus
	err := c.ask(ctx, proto.OpExec, proto.Request{
		OperationID: cmd.OperationID, Generation: c.cfg.Generation, Requires: append(cmd.requires(), proto.FeatureDetach),
	}, request, &status)
	return detached(status.CommandStatus, status.Result), err
}

// Attachment says what of a detached command is wanted.
type Attachment struct {
	// Stdout and Stderr get the streams as Command.Stdout and Stderr do, except
	// that they are always two.
	Stdout, Stderr io.Writer
	// StdoutFrom and StderrFrom are the first bytes wanted. If the guest agent has
	// not kept them, they are where it begins instead.
	StdoutFrom, StderrFrom int64
	// Now: what there is now. Otherwise Attach returns when the command has ended.
	Now bool
}

// Attach follows a detached command. While it is attached the command waits for
// Writers that are slow, so that nothing more is lost; when ctx ends it goes on.
// An error that is client.Error{Code: proto.CodeOperationUnknown} says that the guest has
// no such command: it was never started, or has ended long ago.
func (c *Client) Attach(ctx context.Context, id string, a Attachment) (Detached, error) {
	request := proto.AttachRequest{
		ID: id, Stdout: proto.OutputDiscard, Stderr: proto.OutputDiscard,
		StdoutFrom: a.StdoutFrom, StderrFrom: a.StderrFrom, Follow: !a.Now,
	}
	writers, queues := map[uint16]io.Writer{}, map[uint16]*proto.Queue{}
	want := func(stream uint16, w io.Writer, mode *string) {
		if w != nil {
			*mode = proto.OutputStream
			writers[stream], queues[stream] = w, proto.NewQueue(outputWindow)
		}
	}
	want(proto.Stdout, a.Stdout, &request.Stdout)
	want(proto.Stderr, a.Stderr, &request.Stderr)
	k, err := c.begin(ctx, proto.OpAttach, proto.Request{Generation: c.cfg.Generation}, request, queues)
	if err != nil {
		return Detached{}, err
	}
	var status commandStatus
	p := &Process{call: k, done: make(chan struct{})}
	p.begin(nil, writers, &status)
	err = p.wait(&status)
	d := detached(status.CommandStatus, status.Result)
	if err == nil && !a.Now && d.Result == nil {
		err = &ConnectionError{Op: proto.OpAttach, Started: true, Err: &proto.ProtocolError{Reason: "an end without a result"}}
	}
	if a.Stdout != nil {
		d.Stdout.Lost = max(0, p.started.StdoutFrom-a.StdoutFrom)
	}
	if a.Stderr != nil {
		d.Stderr.Lost = max(0, p.started.StderrFrom-a.StderrFrom)
	}
	if d.Result != nil {
		d.Result.lose(d.Stdout.Lost, d.Stderr.Lost)
	}
	return d, err
}

// Signal sends a signal to the main process of a detached command and its process
// group, or with all to every process that its containment reaches. It returns what
// the command was before: one that was not running gets none.
func (c *Client) Signal(ctx context.Context, id string, signal int, all bool) (Detached, error) {
	var status commandStatus
	err := c.ask(ctx, proto.OpSignal, proto.Request{Generation: c.cfg.Generation}, proto.SignalRequest{ID: id, Signal: signal, All: all}, &status)
	return detached(status.CommandStatus, status.Result), err
}

// maxCommands is more than a guest agent keeps.
const maxCommands = 10_000

// Commands lists the detached commands that the guest agent knows, oldest first.
func (c *Client) Commands(ctx context.Context) ([]Detached, error) {
	var list []Detached
	var request proto.CommandsRequest
	for {
		var part struct {
			Commands []commandStatus `json:"commands"`
			More     bool            `json:"more"`
		}
		if err := c.simple(ctx, proto.OpCommands, request, &part); err != nil {
			return nil, err
		}
		for _, s := range part.Commands {
			if s.Number <= request.After || len(list) == maxCommands {
				return nil, &ConnectionError{Op: proto.OpCommands, Started: true, Err: &proto.ProtocolError{Reason: "a list of commands that does not end"}}
			}
			list = append(list, detached(s.CommandStatus, s.Result))
			request.After = s.Number
		}
		if !part.More || len(part.Commands) == 0 {
			return list, nil
		}
	}
}
