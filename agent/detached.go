package agent

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Bounds of what is kept of detached commands that have ended.
const (
	maxEnded    = 256
	maxEndedFor = time.Hour
)

// commands are the detached commands of this guest: those that run and, for a
// while, those that have ended. Nothing wakes up to forget one: it happens when
// the next begins or is asked for.
type commands struct {
	limit int // how many may run
	logs  logs

	mu      sync.Mutex
	counted int64
	list    []*detached // in the order of their start
	running sync.WaitGroup
}

// detached is a command that belongs to no connection.
type detached struct {
	id     string
	number int64
	args   []proto.Text
	begun  time.Duration   // since boot
	ctx    context.Context // its end kills the command
	cancel context.CancelFunc
	cut    atomic.Bool // killed because its input broke off

	stdout, stderr *streamLog

	// ready is closed when the command runs or could not be started, which is
	// refused then.
	ready   chan struct{}
	refused error
	x       *execution

	// done is closed when it has ended, with its result.
	done   chan struct{}
	result proto.ExecResult
	ended  time.Duration // since boot
}

// find returns nil if there is no such command (any more).
func (c *commands) find(id string) *detached {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.findLocked(id)
}

func (c *commands) findLocked(id string) *detached {
	c.expire()
	for _, d := range c.list {
		if d.id == id {
			return d
		}
	}
	return nil
}

// expire forgets commands that ended too long ago or before too many others,
// unless somebody is reading what they wrote. mu is held.
func (c *commands) expire() {
	now, ended := uptime(), 0
	for i := len(c.list) - 1; i >= 0; i-- {
		d := c.list[i]
		if !d.over() {
			continue
		}
		if ended++; ended <= maxEnded && now-d.ended <= maxEndedFor {
			continue
		}
		if c.logs.forget(d.stdout, d.stderr) {
			c.list = slices.Delete(c.list, i, i+1)
		}
	}
}

func (d *detached) over() bool {
	select {
	case <-d.done:
		return true
	default:
		return false
	}
}

// claim returns the command with this id, or makes one, which does not run yet,
// if the id is new.
func (c *commands) claim(id string, args []proto.Text, ids *operations) (d *detached, isNew bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := c.findLocked(id); d != nil {
		return d, false, nil
	}
	running := c.runningLocked()
	if running >= c.limit {
		e := failure(proto.CodeTooManyOperations, "%d detached commands are running", running)
		e.Retryable = true
		return nil, false, e
	}
	if !ids.add(id) {
		return nil, false, failure(proto.CodeOperationExists, "operation %q was started before, and what became of it is not known any more", id)
	}
	c.counted++
	d = &detached{
		id: id, number: c.counted, args: shorten(args), begun: uptime(),
		stdout: newStreamLog(&c.logs), stderr: newStreamLog(&c.logs),
		ready: make(chan struct{}), done: make(chan struct{}),
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	c.list = append(c.list, d)
	return d, true, nil
}

func (c *commands) countRunning() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runningLocked()
}

func (c *commands) runningLocked() int {
	n := 0
	for _, d := range c.list {
		if !d.over() {
			n++
		}
	}
	return n
}

// drop forgets a command that could not be started.
func (c *commands) drop(d *detached) {
	d.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = slices.DeleteFunc(c.list, func(other *detached) bool { return other == d })
}

// close kills every command and waits.
func (c *commands) close() {
	c.mu.Lock()
	for _, d := range c.list {
		d.cancel()
	}
	c.mu.Unlock()
	c.running.Wait()
}

// shorten returns the beginning of an argument vector, 256 bytes at most.
func shorten(args []proto.Text) []proto.Text {
	left := 256
	var short []proto.Text
	for _, a := range args {
		if left == 0 {
			break
		}
		a = a[:min(len(a), left)]
		left -= len(a)
		short = append(short, a)
	}
	return short
}

// execDetached starts a command that outlives its connection, or finds the one
// that an earlier request with this id has started.
func (s *session) execDetached(r proto.ExecRequest) (any, error) {
	switch {
	case s.request.OperationID == "":
		return nil, failure(proto.CodeInvalidRequest, "a detached command needs an operation id")
	case r.Terminal != nil:
		return nil, failure(proto.CodeInvalidRequest, "a detached command cannot have a terminal")
	case r.Stdin && !r.Follow:
		return nil, failure(proto.CodeInvalidRequest, "a detached command that nobody follows cannot have input")
	}
	d, isNew, err := s.detach(r)
	if err != nil {
		return nil, err
	}
	if d.refused != nil {
		return d.notInvoked(r.Follow)
	}
	v := &view{detached: d, follow: r.Follow}
	if r.Follow {
		v.open(proto.AttachRequest{Stdout: r.Stdout, Stderr: r.Stderr, Follow: true})
	}
	if isNew {
		s.stdin, s.keepInput = d.x.stdin, true
		go d.run()
	}
	if err := s.show(v); err != nil {
		return nil, err
	}
	if r.Follow {
		return d.result, nil
	}
	return d.status(), nil
}

// notInvoked is the result of a command that the guest refused to start.
func (d *detached) notInvoked(follow bool) (any, error) {
	result, err := notInvoked(d.refused)
	if err != nil || follow {
		return result, err
	}
	r := result.(proto.ExecResult)
	return proto.CommandStatus{ID: d.id, Args: d.args, State: proto.CommandEnded, Result: &r}, nil
}

// detach returns the command of this request, started or refused. The first of
// several requests with one id lets it run.
func (s *session) detach(r proto.ExecRequest) (d *detached, isNew bool, err error) {
	if d, isNew, err = s.claim(r); err == nil {
		<-d.ready
	}
	return d, isNew && err == nil && d.refused == nil, err
}

func (s *session) claim(r proto.ExecRequest) (d *detached, isNew bool, err error) {
	if err := s.admit(); err != nil {
		return nil, false, err
	}
	a := s.agent
	defer a.renewal.RUnlock()
	d, isNew, err = a.commands.claim(s.request.OperationID, r.Args, &a.ids)
	if err != nil || !isNew {
		return d, false, err
	}
	defer close(d.ready)
	d.x = &execution{agent: a, ctx: d.ctx, request: r, sink: d.log}
	if d.refused = d.x.launch(); d.refused != nil {
		a.commands.drop(d)
		a.ids.forget(d.id)
	} else {
		d.endUnused()
		a.commands.running.Add(1)
	}
	return d, true, nil
}

// endUnused ends the logs of streams that are discarded, or one with the other.
func (d *detached) endUnused() {
	if d.x.stdout == nil {
		d.stdout.end()
	}
	if d.x.stderr == nil {
		d.stderr.end()
	}
}

// log is the sink of a stream.
func (d *detached) log(stream uint16) sink {
	if stream == proto.Stdout {
		return d.stdout
	}
	return d.stderr
}

// run accompanies the command to its end.
func (d *detached) run() {
	defer d.x.agent.commands.running.Done()
	defer d.cancel()
	d.result = d.x.run()
	if d.cut.Load() && d.result.Signal != 0 {
		d.result.Error = failure(proto.CodeInputCut, "the connection broke before the input's end")
	}
	d.ended = uptime()
	close(d.done)
}

// status is what is known of the command, which is ready.
func (d *detached) status() proto.CommandStatus {
	st := proto.CommandStatus{
		ID: d.id, Number: d.number, Args: d.args, PID: d.x.process.pid, State: proto.CommandRunning,
		AgeMS: (uptime() - d.begun).Milliseconds(), Containment: d.x.process.containment(),
		Stdout: d.stdout.status(), Stderr: d.stderr.status(),
	}
	if d.over() {
		st.State = proto.CommandEnded
		st.Result = &d.result
	}
	return st
}

// view is what one connection is shown of a detached command.
type view struct {
	*detached
	follow         bool
	stdout, stderr *logReader // nil: not wanted
}

// open begins to read the streams that are wanted: from now on nothing of them is
// lost.
func (v *view) open(r proto.AttachRequest) {
	if r.Stdout == proto.OutputStream {
		v.stdout = v.detached.stdout.reader(r.StdoutFrom, r.Follow)
	}
	if r.Stderr == proto.OutputStream {
		v.stderr = v.detached.stderr.reader(r.StderrFrom, r.Follow)
	}
}

// streams are the readers by the numbers of their streams.
func (v *view) streams() map[uint16]*logReader {
	m := map[uint16]*logReader{}
	if v.stdout != nil {
		m[proto.Stdout] = v.stdout
	}
	if v.stderr != nil {
		m[proto.Stderr] = v.stderr
	}
	return m
}

func (v *view) leave() {
	for _, r := range v.streams() {
		r.leave()
	}
}

// show sends a view to the host: what is kept, what comes, and all of that before
// the result, for which it waits if the view follows the command.
func (s *session) show(v *view) error {
	defer v.leave()
	stop := context.AfterFunc(s.ctx, v.leave)
	defer stop()
	s.windows = map[uint16]*proto.Window{}
	started := proto.Started{PID: v.x.process.pid, Containment: v.x.process.containment()}
	for stream, r := range v.streams() {
		s.windows[stream] = proto.NewWindow()
		if stream == proto.Stdout {
			started.StdoutFrom = r.at
		} else {
			started.StderrFrom = r.at
		}
	}
	s.control = v.x.control
	s.announce(started)
	s.listen()
	if s.stdin != nil {
		go v.feed(s)
	} else if v.x.request.Stdin {
		// The connection that started the command sends it.
		_ = s.wire.WriteCredit(proto.Stdin, 0, proto.FlagEnd)
	}
	var sent sync.WaitGroup
	for stream, r := range v.streams() {
		sent.Go(func() { s.sendLog(r, &wireSink{wire: s.wire, window: s.windows[stream], stream: stream}) })
	}
	sent.Wait()
	if v.follow {
		select {
		case <-v.done:
		case <-s.ctx.Done():
			return s.ctx.Err()
		}
	}
	return nil
}

// feed sends the command what comes from the host. Half of its input is nothing
// that it should go on with.
func (v *view) feed(s *session) {
	if v.x.feed(s.wire) {
		return
	}
	v.cut.Store(true)
	v.cancel()
}

// sendLog sends what a reader gets, as the host grants credit.
func (s *session) sendLog(r *logReader, to *wireSink) {
	defer r.leave()
	for r.wait() {
		room := to.room(chunkSize)
		if room == 0 {
			return
		}
		buf := buffers.Get().(*[proto.HeaderSize + chunkSize]byte)
		n := r.read(buf[proto.HeaderSize : proto.HeaderSize+room])
		if n > 0 {
			to.take(buf[:proto.HeaderSize+n])
		}
		buffers.Put(buf)
	}
	to.end()
}

// command returns a detached command that has been started.
func (s *session) command(id string) (*detached, error) {
	d := s.agent.commands.find(id)
	if d == nil {
		return nil, failure(proto.CodeOperationUnknown, "no detached command has the id %.128q", id)
	}
	<-d.ready
	if d.refused != nil {
		return nil, failure(proto.CodeOperationUnknown, "the command with the id %.128q could not be started", id)
	}
	return d, nil
}

// attach shows a detached command to the host.
func (s *session) attach(r proto.AttachRequest) (proto.CommandStatus, error) {
	for _, mode := range []string{r.Stdout, r.Stderr} {
		if mode != proto.OutputStream && mode != proto.OutputDiscard {
			return proto.CommandStatus{}, failure(proto.CodeInvalidRequest, "output mode %.40q", mode)
		}
	}
	if err := s.enter(); err != nil {
		return proto.CommandStatus{}, err
	}
	d, err := s.command(r.ID)
	if err != nil {
		return proto.CommandStatus{}, err
	}
	v := &view{detached: d, follow: r.Follow}
	v.open(r)
	if err := s.show(v); err != nil {
		return proto.CommandStatus{}, err
	}
	return d.status(), nil
}

// signal sends a signal to a detached command and returns what it was before. One
// that had ended gets none.
func (s *session) signal(r proto.SignalRequest) (proto.CommandStatus, error) {
	if r.Signal < 1 || r.Signal > 64 {
		return proto.CommandStatus{}, failure(proto.CodeInvalidRequest, "signal %d", r.Signal)
	}
	if err := s.enter(); err != nil {
		return proto.CommandStatus{}, err
	}
	d, err := s.command(r.ID)
	if err != nil {
		return proto.CommandStatus{}, err
	}
	before := d.status()
	switch {
	case before.State == proto.CommandEnded:
	case r.All:
		d.x.process.signalAll(syscall.Signal(r.Signal))
	default:
		d.x.process.signal(syscall.Signal(r.Signal))
	}
	return before, nil
}

// maxCommands bounds the entries of one list of commands, which is one frame.
const maxCommands = 250

// commands lists the detached commands, a part at a time.
func (s *session) commands(r proto.CommandsRequest) (proto.CommandsResult, error) {
	c := &s.agent.commands
	c.mu.Lock()
	c.expire()
	list := slices.Clone(c.list)
	c.mu.Unlock()
	result := proto.CommandsResult{Commands: []proto.CommandStatus{}}
	for _, d := range list {
		if d.number <= r.After {
			continue
		}
		if len(result.Commands) == maxCommands {
			result.More = true
			break
		}
		if <-d.ready; d.refused == nil {
			result.Commands = append(result.Commands, d.status())
		}
	}
	return result, nil
}
