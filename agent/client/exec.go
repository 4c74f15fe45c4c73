package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// outputWindow is how much of an output stream is on its way or waits for its
// Writer.
const outputWindow = 256 << 10

// inputChunk is how much is read from Stdin at once.
const inputChunk = 32 << 10

// Command is a program to run in a guest.
type Command struct {
	// Args is the argument vector. Args[0] is looked up in the guest.
	Args []string
	// Env entries (NAME=value) are added to the guest agent's default
	// environment (PATH, HOME, USER, LOGNAME), or are all of it with ClearEnv.
	Env      []string
	ClearEnv bool
	// Dir is the working directory; empty: the user's home.
	Dir string
	// User is "name", "uid", "name:group" or "uid:gid"; empty: root.
	User string
	// Groups are supplementary groups in addition to the user's.
	Groups []string
	// Limits of the command's resources, see setrlimit(2).
	Limits []ResourceLimit
	// Terminal, if set, gives the command a terminal of this size: Stdin is what
	// is typed, Stdout gets what it shows, Stderr nothing.
	Terminal *TerminalSize
	// Resize, if set, has further sizes of the terminal. Nobody receives from it
	// once the command has ended.
	Resize <-chan TerminalSize
	// Stdin is copied to the command until its end. Nil: /dev/null.
	Stdin io.Reader
	// Stdout and Stderr receive the streams, each from its own goroutine, so
	// that one that is slow does not hold up the other. Nil: /dev/null. If both
	// are the same Writer the streams are one pipe in the guest and keep their
	// order.
	Stdout, Stderr io.Writer
	// StdoutLimit and StderrLimit cut a stream after so many bytes; what comes
	// later is counted and dropped. 0: no limit.
	StdoutLimit, StderrLimit int64
	// Timeout kills the command and all its descendants; the result says so.
	// 0: none. Unlike the end of ctx it is an orderly outcome with all output
	// that there was.
	Timeout time.Duration
	// OperationID, if set, is a name that no other command of the guest has, at
	// most 128 bytes. The command is then detached: it belongs to no connection.
	// When the connection breaks or ctx ends it goes on, unless it had not got all
	// of Stdin; the same call made again never starts it a second time but is
	// attached to it, and gets of its output what the guest has kept. Attach, Signal
	// and Commands know it by this name, for a while also after its end. Without
	// a Terminal only.
	OperationID string
}

// ResourceLimit limits a resource. Name is that of setrlimit(2), in lower case
// without RLIMIT_: "nofile". Unlimited is no limit.
type ResourceLimit = proto.ResourceLimit

// Unlimited is no limit.
const Unlimited = proto.Unlimited

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct{ Rows, Columns uint16 }

// Result is how a command ended.
type Result struct {
	// ExitCode is the command's own; 124 if it timed out, 126 if it cannot be
	// invoked, 127 if it was not found, 128+n if signal n ended it.
	ExitCode  int  `json:"exit_code"`
	Signal    int  `json:"signal,omitempty"`
	TimedOut  bool `json:"timed_out"`
	OOMKilled bool `json:"oom_killed"`
	// PeakMemoryBytes is the most memory that the command and its descendants had
	// at once, file cache included; 0 if the guest does not know.
	PeakMemoryBytes int64 `json:"peak_memory_bytes,omitempty"`
	// The streams: whether a limit cut them, bytes sent and bytes dropped.
	StdoutTruncated bool  `json:"stdout_truncated"`
	StderrTruncated bool  `json:"stderr_truncated"`
	StdoutBytes     int64 `json:"stdout_bytes"`
	StderrBytes     int64 `json:"stderr_bytes"`
	StdoutDropped   int64 `json:"stdout_dropped"`
	StderrDropped   int64 `json:"stderr_dropped"`
	// DurationMS is the time from start to exit by the guest's clock.
	DurationMS int64 `json:"duration_ms"`
	// Containment is how far a kill reaches: "cgroup", all descendants, or
	// "process_group", those that stayed in it. Empty if nothing was started.
	Containment string `json:"containment,omitempty"`
	// Error says why the command could not be invoked (126 and 127), or that it
	// was killed because its input broke off.
	Error *Error `json:"error,omitempty"`
}

// Exec runs a command and waits for its main process; background processes that
// it leaves behind go on. It has delivered all output when it returns. A
// command whose ctx ends is killed with its descendants, unless it has an
// OperationID.
//
// If Stdin is still being read when the command ends, Exec does not wait for
// that: one Read may be under way, and its bytes are lost.
//
// An error of a Writer is returned together with the Result.
func (c *Client) Exec(ctx context.Context, cmd Command) (Result, error) {
	p, err := c.Start(ctx, cmd)
	if err != nil {
		return Result{}, err
	}
	return p.Wait()
}

// Process is a command whose request was sent.
type Process struct {
	call    *call
	started proto.Started
	result  Result
	counted sync.Once // what the guest had not kept is in result
	err     error
	done    chan struct{}

	outputs sync.WaitGroup
	mu      sync.Mutex
	failed  error // first error of a Writer
	unread  error // error of Stdin, for which the call was given up
}

// Start sends a command to the guest and returns without waiting for it. Wait
// must be called.
func (c *Client) Start(ctx context.Context, cmd Command) (*Process, error) {
	p := &Process{done: make(chan struct{})}
	request, writers := cmd.request()
	queues := map[uint16]*proto.Queue{}
	for stream := range writers {
		queues[stream] = proto.NewQueue(outputWindow)
	}
	k, err := c.beginExec(ctx, cmd, request, queues)
	if errors.Is(err, proto.ErrTooLarge) {
		// The guest could not have invoked it either; the outcome is the same.
		p.result = Result{ExitCode: proto.ExitNotExecutable, Error: &Error{
			Code:    proto.CodeArgumentTooLong,
			Message: fmt.Sprintf("arguments and environment do not fit into a request of %d bytes", proto.MaxControl),
		}}
		close(p.done)
		return p, nil
	}
	if err != nil {
		return nil, err
	}
	p.call = k
	p.begin(cmd.Stdin, writers, &p.result)
	if cmd.Resize != nil {
		go p.resize(cmd.Resize)
	}
	return p, nil
}

// beginExec sends the request. A guest agent that knows no detached commands runs
// one with an OperationID like any other, and refuses to run it twice.
func (c *Client) beginExec(ctx context.Context, cmd Command, request proto.ExecRequest, queues map[uint16]*proto.Queue) (*call, error) {
	if cmd.Stdin != nil || cmd.Terminal != nil || cmd.OperationID != "" {
		c = New(c.cfg) // what the guest says of input may come behind the result
	}
	envelope := proto.Request{OperationID: cmd.OperationID, Generation: c.cfg.Generation}
	envelope.Requires = cmd.requires()
	if cmd.OperationID == "" || cmd.Terminal != nil {
		return c.begin(ctx, proto.OpExec, envelope, request, queues)
	}
	detached, plain := envelope, request
	detached.Requires = append(cmd.requires(), proto.FeatureDetach)
	request.Detach, request.Follow = true, true
	k, err := c.begin(ctx, proto.OpExec, detached, request, queues)
	if err == nil && !slices.Contains(k.features, proto.FeatureDetach) {
		k.end()
		if err := k.conclude(nil, nil); err != nil {
			return nil, err
		}
		return c.begin(ctx, proto.OpExec, envelope, plain, queues)
	}
	return k, err
}

// requires are the features without which the guest agent would run something else.
func (cmd Command) requires() (features []string) {
	if cmd.Terminal != nil {
		features = append(features, proto.FeatureTerminal)
	}
	if len(cmd.Groups) > 0 || len(cmd.Limits) > 0 {
		features = append(features, proto.FeatureLimits)
	}
	return features
}

func (cmd Command) request() (proto.ExecRequest, map[uint16]io.Writer) {
	r := proto.ExecRequest{
		Args: proto.Texts(cmd.Args), Env: proto.Texts(cmd.Env), ClearEnv: cmd.ClearEnv,
		Dir: proto.Text(cmd.Dir), User: cmd.User, Groups: cmd.Groups, Limits: cmd.Limits, Stdin: cmd.Stdin != nil,
		StdoutLimit: cmd.StdoutLimit, StderrLimit: cmd.StderrLimit,
	}
	if cmd.Timeout > 0 {
		r.TimeoutMS = max(1, cmd.Timeout.Milliseconds())
	}
	writers := map[uint16]io.Writer{}
	r.Stdout, r.Stderr = proto.OutputDiscard, proto.OutputDiscard
	if cmd.Stdout != nil {
		r.Stdout = proto.OutputStream
		writers[proto.Stdout] = cmd.Stdout
	}
	if cmd.Terminal != nil {
		size := proto.TerminalSize(*cmd.Terminal)
		r.Terminal, r.Stdin = &size, true
		return r, writers
	}
	switch {
	case cmd.Stderr == nil:
	case same(cmd.Stdout, cmd.Stderr):
		r.Stderr = proto.OutputStdout
	default:
		r.Stderr = proto.OutputStream
		writers[proto.Stderr] = cmd.Stderr
	}
	return r, writers
}

// same compares Writers; some types cannot be compared and are then different.
func same(a, b io.Writer) (equal bool) {
	defer func() {
		if recover() != nil {
			equal = false
		}
	}()
	return a == b
}

// begin handles what comes until the result, which it decodes.
func (p *Process) begin(stdin io.Reader, writers map[uint16]io.Writer, result any) {
	k := p.call
	k.onStart = func(s proto.Started) { p.started = s }
	for stream, w := range writers {
		p.outputs.Add(1)
		go p.deliver(stream, k.queues[stream], w)
	}
	window := proto.NewWindow()
	k.onCredit = func(stream uint16, n int, f proto.Flags) error {
		if stream != proto.Stdin {
			return nil
		}
		if f&proto.FlagEnd != 0 {
			window.Close()
			return nil
		}
		return window.Add(n)
	}
	if stdin != nil {
		go p.feed(stdin, window)
	}
	go func() {
		defer close(p.done)
		defer window.Close()
		p.err = k.finish(result)
		for _, q := range k.queues {
			if p.err != nil {
				q.Close()
			} else {
				q.End()
			}
		}
		k.stop()
	}()
}

// Wait waits for the command's end and returns what Exec returns.
func (p *Process) Wait() (Result, error) {
	err := p.wait(&p.result)
	return p.result, err
}

// wait waits for the end of a call whose result is decoded into result.
func (p *Process) wait(result any) error {
	<-p.done
	p.outputs.Wait()
	if p.call == nil {
		return nil
	}
	p.call.end()
	if p.err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.unread != nil {
			p.err = fmt.Errorf("read input of command: %w", p.unread)
		}
		return p.call.conclude(nil, p.err)
	}
	p.counted.Do(func() { p.result.lose(p.started.StdoutFrom, p.started.StderrFrom) })
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.call.conclude(result, p.failed)
}

// lose counts bytes that the guest had not kept when it was asked for them.
func (r *Result) lose(stdout, stderr int64) {
	r.StdoutBytes -= stdout
	r.StdoutDropped += stdout
	r.StdoutTruncated = r.StdoutTruncated || stdout > 0
	r.StderrBytes -= stderr
	r.StderrDropped += stderr
	r.StderrTruncated = r.StderrTruncated || stderr > 0
}

// Signal sends a signal to the command's main process and its process group.
// It has no effect before the command has started or after it has ended.
func (p *Process) Signal(signal int) error {
	if p.call == nil {
		return nil
	}
	return p.call.wrap(p.call.wire.WriteJSON(proto.TypeControl, proto.Control{Signal: signal}))
}

// resize passes sizes of the terminal on until the command's end.
func (p *Process) resize(sizes <-chan TerminalSize) {
	for {
		select {
		case size, more := <-sizes:
			if !more {
				return
			}
			resize := proto.TerminalSize(size)
			// An error is one of the connection, of which Wait tells.
			_ = p.call.wire.WriteJSON(proto.TypeControl, proto.Control{Resize: &resize})
		case <-p.done:
			return
		}
	}
}

// deliver writes one stream to its Writer.
func (p *Process) deliver(stream uint16, q *proto.Queue, w io.Writer) {
	defer p.outputs.Done()
	var b []byte
	for {
		var ok bool
		if b, ok = q.Pop(b); !ok {
			return
		}
		p.call.moved(stream, b)
		if _, err := w.Write(b); err != nil {
			p.mu.Lock()
			if p.failed == nil {
				p.failed = fmt.Errorf("write output of command: %w", err)
			}
			p.mu.Unlock()
			q.Close()
			p.call.wire.WriteCredit(stream, 0, proto.FlagEnd)
			return
		}
		if n := q.Consumed(len(b)); n > 0 {
			p.call.wire.WriteCredit(stream, n, 0)
		}
	}
}

// feed copies stdin to the command. A command whose input cannot be read is given
// up: it would wait, or take what there was for everything.
func (p *Process) feed(stdin io.Reader, window *proto.Window) {
	if err := p.call.send(p.call.observed(proto.Stdin, stdin), window); err != nil {
		p.mu.Lock()
		p.unread = err
		p.mu.Unlock()
		p.call.conn.Close()
	}
}

// send copies r to the Stdin stream as credit allows. It reads no further than
// it may send, and stops when the agent takes no more. Once the context is done
// the end of r is no end of the stream: whoever cancels may close r next, and what
// came until then is not everything.
func (k *call) send(r io.Reader, window *proto.Window) error {
	buf := make([]byte, proto.HeaderSize+inputChunk)
	for {
		room := window.Wait(inputChunk)
		if room == 0 {
			return nil
		}
		n, err := r.Read(buf[proto.HeaderSize : proto.HeaderSize+room])
		if n > 0 {
			window.Use(n)
			if err := k.wire.WriteData(proto.Stdin, 0, buf[:proto.HeaderSize+n]); err != nil {
				return nil // the reader of the connection says why
			}
		}
		switch {
		case err == nil:
		case err != io.EOF:
			return err
		case k.ctx.Err() != nil || overdue(k.ctx):
			return nil // the connection is about to be closed
		default:
			k.wire.WriteData(proto.Stdin, proto.FlagEnd, buf[:proto.HeaderSize])
			return nil
		}
	}
}
