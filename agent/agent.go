// Package agent is the guest agent: the program inside the guest that runs
// commands, moves files and renews a clone's identity on behalf of the host.
//
// It serves any net.Listener (in a guest: ListenVsock) with the protocol of
// package proto, one operation per connection, and keeps no state that the
// host would have to know about beyond the guest's generation. It is part of
// every snapshot, so it is small and waits without waking up.
package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Config says how an Agent fits into its guest.
type Config struct {
	// Version is reported by ping.
	Version string
	// Init is set when the process is PID 1: every child that dies is reaped,
	// not only those that the agent started.
	Init bool
	// Cgroup is a cgroup v2 directory of the agent's own, in which each command
	// gets a group. Empty: commands are held together by their process group
	// only, and results say so. See FindCgroup.
	Cgroup string
	// StateDir receives the file "generation". Empty: no such file.
	StateDir string
	// HooksDir has programs that a clone runs after its renewal and before its first
	// command. Empty: none.
	HooksDir string
	// HooksTimeout bounds all of them together; 0: 30 s.
	HooksTimeout time.Duration
	// Identity renews what a clone has in common with its parent. Nil: renew is
	// refused as unsupported. See NewIdentity.
	Identity Identity
	// Shutdown begins an orderly end of the guest, returns at once and says who
	// brings it about; action is one of the proto.Shutdown words. Nil:
	// unsupported. See AskInit.
	Shutdown func(action string) (method string, err error)
	// MaxOperations at the same time, and detached commands; 0: 1024. More are
	// refused as retryable.
	MaxOperations int
	// Log receives what an operator of the guest should know. Nil: dropped.
	Log func(message string)
}

// handshakeTimeout bounds how long a connection may take to say what it wants.
const handshakeTimeout = 10 * time.Second

// Agent serves operations. It is made by New and ended by Close.
type Agent struct {
	cfg    Config
	reaper *reaper
	groups *cgroups // nil: none
	drains drains
	ids    operations
	// commands are those that belong to no connection.
	commands commands
	// protected: this process is spared when memory runs out, its children
	// would inherit that.
	protected bool

	// renewal is held for reading while a command is being started and for
	// writing while the identity changes: no command starts with half of one.
	renewal    sync.RWMutex
	generation string
	// renewedTicks is when the generation was published, as processes' start times are.
	renewedTicks uint64

	mu       sync.Mutex
	closed   bool
	stopping bool
	sessions map[*session]struct{}
	resting  int            // sessions that wait for another question
	wg       sync.WaitGroup // one for each session
}

// New returns an agent that is ready to serve. It watches SIGCHLD until Close.
// Protect, if at all, comes before it.
func New(cfg Config) (*Agent, error) {
	if cfg.MaxOperations == 0 {
		cfg.MaxOperations = 1024
	}
	if cfg.HooksTimeout == 0 {
		cfg.HooksTimeout = 30 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = func(string) {}
	}
	a := &Agent{cfg: cfg, commands: commands{limit: cfg.MaxOperations}, sessions: map[*session]struct{}{}, protected: isProtected()}
	if cfg.Cgroup != "" {
		groups, err := openCgroups(cfg.Cgroup)
		if err != nil {
			cfg.Log("commands are held by their process group only: " + err.Error())
		} else {
			a.groups = groups
		}
	}
	a.reaper = newReaper(cfg.Init)
	rehearse()
	return a, nil
}

// Close ends all connections, kills their commands and detached ones, and waits. Background
// processes of commands that had finished stay alive.
func (a *Agent) Close() error {
	a.mu.Lock()
	a.closed = true
	for s := range a.sessions {
		s.cancel()
	}
	a.mu.Unlock()
	a.wg.Wait()
	a.commands.close()
	a.drains.close()
	a.reaper.close()
	if a.groups != nil {
		a.groups.sweep()
	}
	return nil
}

// Serve accepts connections until ctx is done or the listener fails, and closes
// the listener. Connections that are open then go on until Close.
func (a *Agent) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	for {
		conn, err := l.Accept()
		switch {
		case err == nil:
			a.start(conn)
		case ctx.Err() != nil:
			return ctx.Err()
		case isTransient(err):
			// Out of descriptors or memory: operations that end will free some.
			time.Sleep(20 * time.Millisecond)
		default:
			return fmt.Errorf("accept connection (%v): %w", l.Addr(), err)
		}
	}
}

func (a *Agent) start(conn net.Conn) {
	s := newSession(a, conn)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		conn.Close()
		return
	}
	s.refused = a.runningLocked() >= a.cfg.MaxOperations
	a.sessions[s] = struct{}{}
	a.wg.Add(1)
	go func() {
		defer a.wg.Done()
		reserveStack(false)
		s.run()
		a.mu.Lock()
		delete(a.sessions, s)
		a.mu.Unlock()
	}()
}

// runningLocked is how many operations there are.
func (a *Agent) runningLocked() int { return len(a.sessions) - a.resting }

// running is how many operations there are beside the caller's.
func (a *Agent) running() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.runningLocked() - 1
}

// maxResting is how many connections may wait for another question: each takes some 9 KiB of
// memory and a descriptor for as long as the host likes.
const maxResting = 64

// rest takes a session out of those that run, until resume. It returns false if enough of
// them rest.
func (a *Agent) rest() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.resting >= maxResting {
		return false
	}
	a.resting++
	return true
}

func (a *Agent) resume(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s.refused = a.runningLocked() >= a.cfg.MaxOperations
	a.resting--
}

// sessionStack is more than any operation needs of its stack.
const sessionStack = 8 << 10

// reserveStack grows the stack of a goroutine that has just begun, in one step. It
// would grow in several in the depth of the first request, and for each the
// runtime looks up every frame in tables that lie all over the program. In a
// clone, where each page that is used for the first time is a fault in the host,
// that is much of the way to its first answer.
//
//go:noinline
func reserveStack(never bool) byte {
	// The room counts although nobody enters it.
	if never {
		var room [sessionStack]byte
		for i := range room {
			room[i] = byte(i)
		}
		return room[len(room)/2]
	}
	return 0
}

func (a *Agent) ping() proto.PingResult {
	a.renewal.RLock()
	generation := a.generation
	a.renewal.RUnlock()
	return proto.PingResult{
		Version:    a.cfg.Version,
		Generation: generation,
		UptimeMS:   uptime().Milliseconds(),
		TimeNS:     time.Now().UnixNano(),
		Operations: a.running(),
	}
}

func (a *Agent) shutdown(r proto.ShutdownRequest) (proto.ShutdownResult, error) {
	if a.cfg.Shutdown == nil {
		return proto.ShutdownResult{}, failure(proto.CodeUnsupported, "this guest agent cannot end the guest")
	}
	if r.Action != proto.ShutdownPowerOff && r.Action != proto.ShutdownReboot {
		return proto.ShutdownResult{}, failure(proto.CodeInvalidRequest, "shutdown action %.40q is neither poweroff nor reboot", r.Action)
	}
	a.mu.Lock()
	a.stopping = true
	a.mu.Unlock()
	method, err := a.cfg.Shutdown(r.Action)
	if err != nil {
		a.mu.Lock()
		a.stopping = false
		a.mu.Unlock()
		return proto.ShutdownResult{}, err
	}
	return proto.ShutdownResult{Method: method}, nil
}

// WaitIdle waits until no operation is running, for at most limit. After a
// shutdown request no new ones begin.
func (a *Agent) WaitIdle(limit time.Duration) {
	deadline := time.Now().Add(limit)
	for time.Now().Before(deadline) {
		a.mu.Lock()
		n := a.runningLocked()
		a.mu.Unlock()
		if n == 0 {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (a *Agent) isStopping() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stopping
}

// operations remembers the ids of operations, so that a request that is sent
// twice never runs twice. Only the newest are kept: an id is a guard against
// retries, which come soon.
type operations struct {
	mu    sync.Mutex
	known map[string]struct{}
	order []string
}

const maxKnownOperations = 4096

// add returns false if the id is known already.
func (o *operations) add(id string) bool {
	if id == "" {
		return true
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, ok := o.known[id]; ok {
		return false
	}
	if o.known == nil {
		o.known = map[string]struct{}{}
	}
	if len(o.order) == maxKnownOperations {
		delete(o.known, o.order[0])
		o.order = append(o.order[:0], o.order[1:]...)
	}
	o.known[id] = struct{}{}
	o.order = append(o.order, id)
	return true
}

// forget drops an id whose operation had no effect, so that it may be retried.
func (o *operations) forget(id string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.known, id)
	for i := len(o.order) - 1; i >= 0; i-- {
		if o.order[i] == id {
			o.order = append(o.order[:i], o.order[i+1:]...)
			return
		}
	}
}

func failure(code, format string, a ...any) *proto.Error {
	return &proto.Error{Code: code, Message: fmt.Sprintf(format, a...)}
}

// asError gives any error a stable word.
func asError(err error) *proto.Error {
	var typed *proto.Error
	if errors.As(err, &typed) {
		return typed
	}
	var broken *proto.ProtocolError
	if errors.As(err, &broken) {
		return failure(proto.CodeProtocol, "%s", broken.Reason)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return failure(proto.CodeProtocol, "no request within %v", handshakeTimeout)
	}
	return fileError(err)
}
