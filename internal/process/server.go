package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/vmm"
	"github.com/forkvm/forkvm/vmm/cpu"
)

// LaunchDescriptor is the number of the launch socket in a VM process.
const LaunchDescriptor = 3

// Serve is the life of a VM process: it prepares a virtual machine, waits for its
// start message, runs the VM and answers at the control socket until the VM has ended.
// It returns what ended it, nil when that was the guest or a kill.
func Serve(ctx context.Context, launch *os.File, o Options) error {
	var timeline machine.Timeline
	timeline.End(phaseProcess)
	c, err := fileConn(launch)
	if err != nil {
		return err
	}
	s := &server{options: o, launcher: c, conns: map[*conn]struct{}{}}
	defer s.close()
	start, files, err := s.wait(ctx, &timeline)
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := s.build(start, files, &timeline); err != nil {
		return errors.Join(err, s.launcher.send(response{Error: classify(err)}, nil))
	}
	go s.watch(start.Attached)
	if err := s.bringUp(ctx, start); err != nil {
		return errors.Join(err, s.launcher.send(response{Error: s.explain(err)}, nil))
	}
	// A launcher that is gone by now will never tell anybody of this VM.
	timeline = append(timeline, s.machine.Timeline()...)
	started := &Started{Ready: time.Since(begun), Timeline: timeline}
	if err := s.launcher.send(response{Started: started}, nil); err != nil {
		return err
	}
	if !start.Attached {
		s.launcher.Close()
	}
	return s.serve(ctx)
}

// server is a running VM process.
type server struct {
	options  Options
	launcher *conn // from whom the start message comes

	confined bool // gives up its privileges when it has built its machine

	// Until the machine takes them over.
	prepared *machine.Prepared
	vsock    *net.UnixListener
	tap      *TapFiles // nil without a TAP device

	machine   *machine.Machine
	role      *machine.Role // of a machine that has rehearsed, when it is known
	directory directory
	console   *os.File
	control   *net.UnixListener

	ready     atomic.Bool
	paused    atomic.Bool
	diskError atomic.Pointer[failure.Error] // set from device workers, so no lock

	unreported unreported

	// living is held from a reset to its record, so that the record is that of the
	// last one.
	living sync.Mutex

	mu       sync.Mutex
	conns    map[*conn]struct{} // nil once the server closes
	handlers sync.WaitGroup
}

// build makes the machine from the start message, or finds what one that has rehearsed is
// to become. It takes over files.
func (s *server) build(form *startForm, files []*os.File, timeline *machine.Timeline) error {
	claimed := claims{files: files, trusted: true}
	defer claimed.close()
	console, err := machine.NewConsoleLog(s.console)
	if err != nil {
		return err
	}
	if s.machine == nil {
		return s.makeMachine(form, &claimed, console, timeline)
	}
	s.role, err = s.takeRole(form, &claimed, console)
	timeline.End(phaseLayers)
	return err
}

func (s *server) makeMachine(form *startForm, files *claims, console io.Writer, timeline *machine.Timeline) error {
	config, err := s.configure(form, files)
	if err != nil {
		return err
	}
	config.Console = console
	timeline.End(phaseLayers)
	if s.machine, err = machine.New(config); err == nil && s.confined {
		err = s.directory.confine()
	}
	return err
}

func (s *server) configure(form *startForm, files *claims) (c machine.Config, err error) {
	c.OnDiskError, c.Quiet = s.noteDiskError, quiet
	if form.Checkpoint == nil {
		return c, errors.New("start message says nothing of what")
	}
	if c.Generation, err = form.Identity.GenerationID(); err != nil {
		return c, err
	}
	checkpoint, err := files.takeCheckpoint(*form.Checkpoint)
	checkpoint.Configure(&c)
	if k := files.take(form.Kernel); k != nil {
		c.Kernel = &machine.Kernel{Image: k, Initrd: files.take(form.Initrd)}
	}
	c.Tops = files.takeAll(form.Tops)
	err = errors.Join(err, files.err)
	if err == nil && form.Network != nil {
		c.Network, c.MAC, err = s.makeNetwork(form, c.Shape.NetworkMTU)
	}
	if err != nil {
		// What the machine would have taken over is still ours.
		c.Close()
		return c, err
	}
	c.Prepared, s.prepared = s.prepared, nil
	c.Vsock.Listener, s.vsock = s.vsock, nil
	c.Vsock.Connect = s.directory.connect
	return c, err
}

// quiet waits for the collector of garbage and stops it, until over is called.
func quiet() (over func()) {
	percent := debug.SetGCPercent(-1)
	return func() { debug.SetGCPercent(percent) }
}

// watch notes when the launcher is gone. While the VM starts that ends it, for
// nobody will ever hear of it; an attached VM it ends at any time.
func (s *server) watch(attached bool) {
	var nothing request
	if _, err := s.launcher.receive(&nothing); err == nil {
		return // it has no more to say
	}
	if attached || !s.ready.Load() {
		s.machine.End(vmm.ReasonKilled, "the program that started this vm is gone")
	}
}

// bringUp starts the guest and waits until it is ready and renewed.
func (s *server) bringUp(ctx context.Context, form *startForm) error {
	ctx, cancel := readyIn(ctx, form.ReadyTimeout)
	defer cancel()
	var err error
	if s.role != nil {
		err = s.machine.Perform(ctx, *s.role)
	} else {
		err = s.machine.Bring(ctx, form.Identity)
	}
	s.ready.Store(err == nil)
	return err
}

// explain turns an error of a start into what the launcher is told. A guest that
// ended says more than a guest agent that did not answer.
func (s *server) explain(err error) *failure.Error {
	if s.machine != nil && s.machine.Exit() != nil {
		return failure.New(failure.GuestEnded, "%w", s.machine.Exit())
	}
	return classify(err)
}

// classify gives errors that a caller can do something about their codes.
func classify(err error) *failure.Error {
	var incompatible *cpu.IncompatibleError
	var unconfirmed *client.UnconfirmedError
	var misfit *machine.ShapeError
	switch {
	case errors.As(err, &misfit), errors.Is(err, machine.ErrNoOrigin), errors.Is(err, machine.ErrNoCard):
		return failure.As(failure.InvalidArgument, err)
	case errors.As(err, &incompatible):
		return failure.As(failure.SnapshotUnsupported, err)
	case errors.As(err, &unconfirmed):
		return failure.As(failure.IdentityUnconfirmed, err)
	}
	return failure.As(failure.Internal, err)
}

// serve answers at the control socket until the guest's life is over.
func (s *server) serve(ctx context.Context) error {
	go s.accept()
	select {
	case <-s.machine.Done():
	case <-ctx.Done():
		s.machine.End(vmm.ReasonKilled, "the VM process was told to end")
	}
	exit := s.machine.Exit()
	err := errors.Join(s.leaveRefusals(), s.directory.writeExit(exit))
	s.close()
	return err
}

func (s *server) accept() {
	for {
		socket, err := s.control.AcceptUnix()
		if err != nil {
			return // closed
		}
		c := newConn(socket)
		s.mu.Lock()
		if s.conns == nil {
			s.mu.Unlock()
			c.Close()
			return
		}
		s.conns[c] = struct{}{}
		s.handlers.Add(1)
		s.mu.Unlock()
		go s.converse(c)
	}
}

// converse answers one caller's requests in their order.
func (s *server) converse(c *conn) {
	defer s.handlers.Done()
	deepenStack(0)
	defer func() {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		c.Close()
	}()
	for {
		var req request
		files, err := c.receive(&req)
		if err != nil {
			return
		}
		if err := s.answer(c, &req, &claims{files: files}); err != nil {
			return
		}
	}
}

// deepenStack makes the calling goroutine's stack as large as answering a request
// needs, while there is next to nothing on it. When it grows below a reset, some
// twenty frames are looked through, more than once: 0.1 ms of each.
//
//go:noinline
func deepenStack(at int) byte {
	var room [16 << 10]byte
	return room[at]
}

func (s *server) answer(c *conn, req *request, files *claims) error {
	defer files.close()
	switch req.Op {
	case opStatus:
		return c.send(response{Status: s.status()}, nil)
	case opPause:
		return c.send(response{Error: s.setPaused(true)}, nil)
	case opResume:
		return c.send(response{Error: s.setPaused(false)}, nil)
	case opNoteUse:
		s.machine.NoteUse()
		return c.send(response{}, nil)
	case opKill:
		s.machine.End(vmm.ReasonKilled, "")
		return c.send(response{}, nil)
	case opCheckpoint:
		return s.checkpoint(c, req, files)
	case opCompact:
		return s.compact(c, req, files)
	case opReset:
		return s.reset(c, req, files)
	case opNetwork:
		if req.Policy != nil {
			return c.send(s.setPolicy(req.Policy), nil)
		}
		return c.send(s.network(), nil)
	case opRefusals:
		return c.send(s.refused(), nil)
	}
	return c.send(response{Error: failure.New(failure.InvalidArgument, "unknown operation %q", req.Op)}, nil)
}

func (s *server) status() *Status {
	st := &Status{State: Running, Generation: s.machine.Generation()}
	if s.paused.Load() {
		st.State = Paused
	}
	st.DiskError = s.diskError.Load()
	if st.Exit = s.machine.Exit(); st.Exit != nil {
		st.State = Ended
	}
	return st
}

func (s *server) setPaused(paused bool) *failure.Error {
	change := s.machine.Resume
	if paused {
		change = s.machine.Pause
	}
	if err := change(); err != nil {
		return s.explain(err)
	}
	s.paused.Store(paused)
	return nil
}

func (s *server) checkpoint(c *conn, req *request, files *claims) error {
	tops := files.takeAll(req.Tops)
	if files.err != nil {
		linux.CloseFiles(tops...)
		return c.send(response{Error: failure.As(failure.InvalidArgument, files.err)}, nil)
	}
	checkpoint, err := s.machine.Checkpoint(tops)
	if err != nil {
		return c.send(response{Error: s.explain(err)}, nil)
	}
	defer checkpoint.Close()
	var t table
	form, state, err := t.addCheckpoint(checkpoint)
	if err != nil {
		return c.send(response{Error: failure.As(failure.Internal, err)}, nil)
	}
	defer state.Close()
	return c.send(response{Checkpoint: &form}, t.files)
}

func (s *server) compact(c *conn, req *request, files *claims) error {
	into := files.takeAll(req.Tops)
	if files.err != nil {
		linux.CloseFiles(into...)
		return c.send(response{Error: failure.As(failure.InvalidArgument, files.err)}, nil)
	}
	if err := s.machine.Compact(into); err != nil {
		return c.send(response{Error: s.explain(err)}, nil)
	}
	return c.send(response{}, nil)
}

func (s *server) reset(c *conn, req *request, files *claims) error {
	defer quiet()() // what the reset leaves is collected when it has been answered
	begun := time.Now()
	if req.Reset == nil {
		return c.send(response{Error: failure.New(failure.InvalidArgument, "reset says nothing of where to")}, nil)
	}
	target, err := takeTarget(req.Tops, req.Reset.Checkpoint, files)
	if err != nil {
		return c.send(response{Error: failure.As(failure.InvalidArgument, err)}, nil)
	}
	target.Identity = req.Reset.Identity
	ctx, cancel := readyIn(context.Background(), req.Reset.ReadyTimeout)
	defer cancel()
	if err := s.resetTo(ctx, target); err != nil {
		return c.send(response{Error: s.explain(err)}, nil)
	}
	return c.send(response{Reset: time.Since(begun)}, nil)
}

func (s *server) resetTo(ctx context.Context, t machine.Target) error {
	s.living.Lock()
	defer s.living.Unlock()
	if _, err := s.machine.Reset(ctx, t); err != nil {
		return err
	}
	s.diskError.Store(nil)
	// Whoever wants to speak to the guest needs its new generation.
	err := s.directory.write(generationFile, t.Identity.Generation)
	if err != nil {
		s.machine.End(vmm.ReasonResetFailed, err.Error())
	}
	return err
}

// takeTarget takes the files of where a machine goes back to; to is nil for what it came
// from.
func takeTarget(tops []int, to *checkpointForm, files *claims) (t machine.Target, err error) {
	t.Tops = files.takeAll(tops)
	if to != nil {
		t.To, err = files.takeCheckpoint(*to)
	}
	if err = errors.Join(err, files.err); err != nil {
		linux.CloseFiles(t.Tops...)
		if t.To != nil {
			t.To.Close()
		}
		return machine.Target{}, err
	}
	return t, nil
}

// readyIn bounds the wait for a guest agent.
func readyIn(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeout, failure.New(failure.GuestNotReady, "guest agent did not answer within %v", timeout))
}

func (s *server) noteDiskError(disk string, err error) {
	s.diskError.Store(failure.As(failure.Internal, fmt.Errorf("disk %s: %w", disk, err)))
}

// close ends the machine and every conversation, and waits for both.
func (s *server) close() {
	s.launcher.Close()
	if s.prepared != nil {
		s.prepared.Close()
	}
	if s.vsock != nil {
		s.vsock.Close()
	}
	s.tap.close()
	if s.control != nil {
		s.control.Close()
	}
	s.mu.Lock()
	conns := s.conns
	s.conns = nil
	for c := range conns {
		c.Close()
	}
	s.mu.Unlock()
	s.handlers.Wait()
	if s.machine != nil {
		s.machine.Close()
	}
	linux.CloseFiles(s.console, s.directory.file)
}
