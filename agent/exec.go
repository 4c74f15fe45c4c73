package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// stdinWindow is how much of a stream from the host the agent holds.
const stdinWindow = 64 << 10

// execution is one command from its request to its result.
type execution struct {
	agent   *Agent
	request proto.ExecRequest
	// ctx kills the command when it ends.
	ctx context.Context
	// sink is where an output stream goes, asked for each that is not discarded.
	sink    func(stream uint16) sink
	process *process
	started time.Time

	stdin          *proto.Queue // what the host sends, or nil
	input          *os.File     // our end of the command's stdin, or nil
	terminal       *os.File     // our end of its terminal, or nil
	stdout, stderr *pump        // nil: discarded
}

// exec runs a command. It returns when the command's main process has ended
// and everything that it had written by then is with the host; processes that
// it left behind, and the pipes they hold, are not waited for.
func (s *session) exec(r proto.ExecRequest) (any, error) {
	if r.TimeoutMS < 0 || r.StdoutLimit < 0 || r.StderrLimit < 0 {
		return nil, failure(proto.CodeInvalidRequest, "negative timeout or limit")
	}
	if r.Detach {
		s.single = true
		return s.execDetached(r)
	}
	s.windows = map[uint16]*proto.Window{}
	x := &execution{agent: s.agent, ctx: s.ctx, request: r, sink: s.wireSink}
	if err := s.start(x); err != nil {
		return notInvoked(err)
	}
	s.stdin, s.control = x.stdin, x.control
	s.announce(proto.Started{PID: x.process.pid, Containment: x.process.containment()})
	s.listen()
	if x.input != nil {
		go x.feed(s.wire)
	}
	return x.run(), nil
}

// wireSink is the sink of a command whose output goes to the host only.
func (s *session) wireSink(stream uint16) sink {
	w := proto.NewWindow()
	s.windows[stream] = w
	return &wireSink{wire: s.wire, window: w, stream: stream}
}

// notInvoked is the result of a command that the guest refused to start.
func notInvoked(err error) (any, error) {
	var refused *refusal
	if errors.As(err, &refused) {
		return proto.ExecResult{ExitCode: refused.exitCode, Error: refused.cause}, nil
	}
	return nil, err
}

// start launches a command for which the operation has been admitted.
func (s *session) start(x *execution) error {
	if err := s.begin(); err != nil {
		return err
	}
	defer s.agent.renewal.RUnlock()
	err := x.launch()
	if err != nil {
		s.agent.ids.forget(s.request.OperationID)
	}
	return err
}

func (x *execution) launch() error {
	c, err := resolve(x.request)
	if err != nil {
		return err
	}
	var ends ends
	defer ends.closeGuest()
	if err := x.open(&ends, c); err != nil {
		ends.closeHost()
		return err
	}
	x.started = time.Now()
	x.process, err = x.agent.launch(c, ends.descriptors(), x.terminal != nil)
	if err != nil {
		ends.closeHost()
	}
	return err
}

// open connects the command's three streams.
func (x *execution) open(e *ends, c command) error {
	if size := x.request.Terminal; size != nil {
		return x.openTerminal(e, *size, c.credential)
	}
	var err error
	if x.request.Stdin {
		if x.input, err = e.input(); err != nil {
			return err
		}
		x.stdin = proto.NewQueue(stdinWindow)
	} else if err := e.null(0, os.O_RDONLY); err != nil {
		return err
	}
	x.stdout, err = x.output(e, 1, proto.Stdout, x.request.Stdout, x.request.StdoutLimit)
	if err != nil {
		return err
	}
	if x.request.Stderr == proto.OutputStdout {
		e.guest[2] = e.guest[1]
		return nil
	}
	x.stderr, err = x.output(e, 2, proto.Stderr, x.request.Stderr, x.request.StderrLimit)
	return err
}

func (x *execution) openTerminal(e *ends, size proto.TerminalSize, who *syscall.Credential) error {
	in, out, err := e.terminal(size, who)
	if err != nil {
		return err
	}
	x.input, x.stdin = in, proto.NewQueue(stdinWindow)
	x.terminal = out
	x.stdout = newPump(out, x.sink(proto.Stdout), x.request.StdoutLimit, &x.agent.drains)
	x.stdout.terminal = true
	return nil
}

func (x *execution) output(e *ends, fd int, stream uint16, mode string, limit int64) (*pump, error) {
	switch mode {
	case proto.OutputDiscard:
		return nil, e.null(fd, os.O_WRONLY)
	case proto.OutputStream:
	default:
		return nil, failure(proto.CodeInvalidRequest, "output mode %.40q of stream %d", mode, stream)
	}
	f, err := e.output(fd)
	if err != nil {
		return nil, err
	}
	return newPump(f, x.sink(stream), limit, &x.agent.drains), nil
}

// run accompanies a command that was started to its end.
func (x *execution) run() proto.ExecResult {
	for _, p := range x.pumps() {
		go p.run()
	}
	exit, timedOut := x.wait()
	if x.input != nil {
		x.input.Close() // whoever still reads it in the guest sees the end
	}
	for _, p := range x.pumps() {
		p.finish()
	}
	for _, p := range x.pumps() {
		<-p.done
	}
	return x.result(exit, timedOut)
}

func (x *execution) pumps() []*pump {
	var list []*pump
	for _, p := range []*pump{x.stdout, x.stderr} {
		if p != nil {
			list = append(list, p)
		}
	}
	return list
}

// announce tells the host that the command runs and how much input it may
// send. If that fails the connection is gone, which listen finds out.
func (s *session) announce(started proto.Started) {
	started.OperationID = s.request.OperationID
	b, err := proto.AppendJSON(nil, proto.TypeStarted, started)
	if err != nil {
		s.cancel()
		return
	}
	if s.stdin != nil {
		b = proto.AppendCredit(b, proto.Stdin, uint32(s.stdin.Size()), 0)
	}
	if s.wire.Write(b) != nil {
		s.cancel()
	}
}

// control does what the host asks for while the command runs.
func (x *execution) control(c proto.Control) {
	if c.Signal > 0 && c.Signal <= 64 {
		x.process.signal(syscall.Signal(c.Signal))
	}
	if c.Resize != nil && x.terminal != nil {
		if raw, err := x.terminal.SyscallConn(); err == nil {
			// A terminal that is gone by now needs no size.
			_ = raw.Control(func(fd uintptr) { _ = resize(int(fd), *c.Resize) })
		}
	}
}

// endOfInput is what a terminal in its usual mode takes for the end (VEOF, ^D).
const endOfInput = 4

// feed writes what the host sends into the command's stdin. It returns false if
// that broke off before its end, and true if the command takes no more. An input
// that broke off stays open: the command would take it for the end and go on until
// it is killed, which the caller sees to.
func (x *execution) feed(wire *proto.Conn) (whole bool) {
	defer func() {
		if whole {
			x.input.Close()
		}
	}()
	var p []byte
	for {
		var ok bool
		if p, ok = x.stdin.Pop(p); !ok {
			if x.terminal != nil && x.stdin.Ended() {
				_, _ = x.input.Write([]byte{endOfInput})
			}
			return x.stdin.Ended()
		}
		if _, err := x.input.Write(p); err != nil {
			// Nobody reads it any more: the host may stop sending.
			x.stdin.Close()
			wire.WriteCredit(proto.Stdin, 0, proto.FlagEnd)
			return true
		}
		if n := x.stdin.Consumed(len(p)); n > 0 {
			wire.WriteCredit(proto.Stdin, n, 0)
		}
	}
}

// wait returns how the main process ended. It kills the command when its time
// is up or the host is gone.
func (x *execution) wait() (e exitStatus, timedOut bool) {
	ctx, cancel := x.ctx, context.CancelFunc(func() {})
	if ms := x.request.TimeoutMS; ms > 0 {
		limit := time.Duration(min(ms, int64(24*365*time.Hour/time.Millisecond))) * time.Millisecond
		ctx, cancel = context.WithDeadline(x.ctx, x.started.Add(limit))
	}
	defer cancel()
	select {
	case e = <-x.process.exit:
		return e, false
	case <-ctx.Done():
	}
	x.process.kill()
	e = <-x.process.exit
	if x.process.group != nil {
		x.process.group.end()
	}
	return e, x.ctx.Err() == nil
}

func (x *execution) result(e exitStatus, timedOut bool) proto.ExecResult {
	r := proto.ExecResult{
		ExitCode:    e.code,
		Signal:      e.signal,
		TimedOut:    timedOut,
		DurationMS:  e.at.Sub(x.started).Milliseconds(),
		Containment: x.process.containment(),
	}
	if e.signal != 0 {
		r.ExitCode = proto.ExitSignalBase + e.signal
	}
	if timedOut {
		r.ExitCode = proto.ExitTimeout
	}
	if g := x.process.group; g != nil {
		r.OOMKilled, r.PeakMemoryBytes = g.oomKills() > 0, g.peakMemory()
		g.close()
	}
	if p := x.stdout; p != nil {
		r.StdoutBytes, r.StdoutDropped, r.StdoutTruncated = p.sent, p.dropped, p.dropped > 0
	}
	if p := x.stderr; p != nil {
		r.StderrBytes, r.StderrDropped, r.StderrTruncated = p.sent, p.dropped, p.dropped > 0
	}
	return r
}

// ends are both sides of a command's streams: the descriptors that it gets,
// closed here once it has them, and ours, closed only if it never starts.
type ends struct {
	guest  [3]int
	opened []int
	host   []*os.File
}

func (e *ends) descriptors() []uintptr {
	return []uintptr{uintptr(e.guest[0]), uintptr(e.guest[1]), uintptr(e.guest[2])}
}

func (e *ends) closeGuest() {
	for _, fd := range e.opened {
		syscall.Close(fd)
	}
}

func (e *ends) closeHost() {
	for _, f := range e.host {
		f.Close()
	}
}

// input makes the pipe for stdin and returns the end to write to.
func (e *ends) input() (*os.File, error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return nil, noStream(err)
	}
	return e.keep(0, p[0], p[1])
}

// output makes a pipe for stdout or stderr and returns the end to read from.
func (e *ends) output(fd int) (*os.File, error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return nil, noStream(err)
	}
	return e.keep(fd, p[1], p[0])
}

// keep files the two ends of a pipe. Only ours does not block: the command gets
// a pipe as any shell would make it.
func (e *ends) keep(fd, theirs, ours int) (*os.File, error) {
	e.guest[fd] = theirs
	e.opened = append(e.opened, theirs)
	if err := syscall.SetNonblock(ours, true); err != nil {
		syscall.Close(ours)
		return nil, noStream(err)
	}
	f := os.NewFile(uintptr(ours), fmt.Sprintf("stream %d", fd))
	e.host = append(e.host, f)
	return f, nil
}

// null connects a descriptor to /dev/null.
func (e *ends) null(fd, flags int) error {
	n, err := syscall.Open("/dev/null", flags|syscall.O_CLOEXEC, 0)
	if err != nil {
		return noStream(&os.PathError{Op: "open", Path: "/dev/null", Err: err})
	}
	e.guest[fd] = n
	e.opened = append(e.opened, n)
	return nil
}

// noStream is for descriptors that cannot be had, usually because there are too
// many already.
func noStream(err error) error {
	e := failure(proto.CodeResourceExhausted, "open streams of the command: %v", err)
	e.Retryable = true
	return e
}
