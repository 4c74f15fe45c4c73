package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot/store"
)

// PrepareConfig says what a VM process needs before it is known what it will run.
// Files stay the caller's.
type PrepareConfig struct {
	// Command is the program and arguments of the VM process, which calls Serve.
	Command []string
	// Directory is the VM's directory, in which MakeOwn has made the process's own. It
	// may be moved as long as the process waits.
	Directory string
	// KVM is the open /dev/kvm.
	KVM *os.File
	// CPUs is the number of vCPUs.
	CPUs int
	// Group, if set, is the directory of a control group for the process, which then gives up all privileges and its view of the
	// file system before its guest runs.
	Group *os.File
	// Tap, if set, is the process's network, and it gives up the same then.
	Tap *TapFiles
	// Launched, if set, is called with the process before it is told anything, so
	// that it is on record before it is a VM. An error ends it.
	Launched func(p *linux.Process) error
}

// StartConfig says what a VM is made of. Files stay the caller's.
type StartConfig struct {
	// Kernel and Initrd for a cold boot; otherwise Checkpoint has a state.
	Kernel, Initrd *os.File
	// Checkpoint has the shape and the layers in both cases. Nil is for a process that has
	// rehearsed, and means what that has: it has the tops, too.
	Checkpoint *machine.Checkpoint
	// WorkingSet is what a process that has rehearsed makes ready beside that; may be nil.
	WorkingSet *store.WorkingSet
	// Tops are the disks' empty top layers, nil for read-only disks.
	Tops         []*os.File
	Identity     machine.Identity
	ReadyTimeout time.Duration
	// Network is what is behind the network card, if the shape has one.
	Network *NetworkConfig
	// Tap is set if the process was prepared with a TAP device.
	Tap *TapConfig
	// Attached makes the VM end with the calling process, however that ends, or
	// when Release is called on the result.
	Attached bool
}

// Prepared is a VM process that has not been started. It ends when its owner does,
// unless it is detached.
type Prepared struct {
	process  *linux.Process
	launcher *conn
}

// Prepare starts a VM process and tells it to make its virtual machine. It does
// not wait for that: what fails is the answer to Start or Detach.
func Prepare(c PrepareConfig) (*Prepared, error) {
	launcher, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	process, err := spawn(c, theirs)
	theirs.Close()
	if err != nil {
		launcher.Close()
		return nil, err
	}
	p := &Prepared{process: process, launcher: launcher}
	if c.Launched != nil {
		err = c.Launched(process)
	}
	if err == nil {
		err = c.send(launcher)
	}
	if err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// spawn starts the process in a session of its own: it outlives the caller and
// does not hear the signals of the caller's terminal.
func spawn(c PrepareConfig, socket *os.File) (*linux.Process, error) {
	log, err := os.OpenFile(filepath.Join(c.Directory, LogFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("start vm process: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(c.Command[0], c.Command[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), c.runtime()...)
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{socket}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if c.Group != nil {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(c.Group.Fd())
	}
	start := cmd.Start
	if c.Tap != nil {
		start = func() error { return linux.InNetwork(c.Tap.Space, cmd.Start) }
	}
	if err := start(); err != nil {
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

// spareProcs is for the goroutines of devices and of the control socket.
const spareProcs = 2

// runtime is how the process's Go runtime is set up.
func (c *PrepareConfig) runtime() []string {
	return []string{
		// Huge pages would make a heap of some hundred kilobytes one of 4 MiB.
		// And the tables with which hash/crc32 uses SSE 4.2 take it longer to make than
		// a VM process ever has to checksum.
		"GODEBUG=disablethp=1,cpu.sse42=off",
		// A vCPU in the guest occupies one of the runtime's processors until the
		// runtime's monitor, which sleeps up to 10 ms, takes it away. On a small host
		// nobody would look at sockets and devices meanwhile; on a large one each
		// process would hold memory for hundreds of processors.
		"GOMAXPROCS=" + strconv.Itoa(c.CPUs+spareProcs),
	}
}

// send makes the sockets and the console log in the VM's directory, and sends
// the prepare message.
func (c *PrepareConfig) send(launcher *conn) error {
	control, err := listen("unixpacket", filepath.Join(c.Directory, ControlSocket))
	if err != nil {
		return fmt.Errorf("create control socket: %w", err)
	}
	defer control.Close()
	vsock, err := listen("unix", VsockPath(c.Directory))
	if err != nil {
		return fmt.Errorf("create vsock socket: %w", err)
	}
	defer vsock.Close()
	directory, err := os.Open(filepath.Join(c.Directory, ownDirectory))
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
	form := prepareForm{
		Control:   t.add(control),
		Vsock:     t.add(vsock),
		Directory: t.add(directory),
		Console:   t.add(console),
		KVM:       t.add(c.KVM),
		CPUs:      c.CPUs,
		Tap:       t.addTap(c.Tap),
		Confined:  c.Group != nil || c.Tap != nil,
	}
	return sent(launcher.send(request{Op: opPrepare, Prepare: &form}, t.files))
}

// Detach returns when the process is ready for its start, and lets go of it. From
// then on it waits for whoever calls Adopt. When it fails the process is gone.
func (p *Prepared) Detach(ctx context.Context) error {
	return p.detached(ctx, sent(p.launcher.send(request{Op: opDetach}, nil)))
}

// detached waits for the answer to what was sent with this error, and lets go.
func (p *Prepared) detached(ctx context.Context, err error) error {
	if err == nil {
		_, err = p.receive(ctx)
	}
	if err != nil {
		p.Kill()
		return err
	}
	p.close()
	return nil
}

// RehearsalConfig says what life a process is to rehearse. Files stay the caller's.
type RehearsalConfig struct {
	// Checkpoint is what VMs begin from.
	Checkpoint *machine.Checkpoint
	// Network and Tap are StartConfig's, of the life that is thrown away.
	Network *NetworkConfig
	Tap     *TapConfig
	// Tops are the disks' top layers in the life that is thrown away, Next those in the VM's.
	Tops, Next []*os.File
	// Identity is that of the life that is thrown away.
	Identity     machine.Identity
	ReadyTimeout time.Duration
}

// Rehearse is Detach of a process that has lived a life of the checkpoint first, and has
// been put back to its beginning. A start without a checkpoint is for such a process, and
// takes what a reset takes.
func (p *Prepared) Rehearse(ctx context.Context, c RehearsalConfig) error {
	var t table
	life := StartConfig{Checkpoint: c.Checkpoint, Tops: c.Tops, Identity: c.Identity, ReadyTimeout: c.ReadyTimeout, Network: c.Network, Tap: c.Tap}
	form, state, err := life.form(&t)
	if err == nil {
		defer linux.CloseFiles(state)
		err = sent(p.launcher.send(request{Op: opRehearse, Start: form, Tops: t.addAll(c.Next)}, t.files))
	}
	return p.detached(ctx, err)
}

// adoptTimeout is how long a process that waits has for its first word.
const adoptTimeout = 10 * time.Second

// Adopt connects to the detached process of a VM's directory. Only the first one
// who calls it gets to start the VM.
func Adopt(ctx context.Context, directory string, pid int, started uint64) (*Prepared, error) {
	c, err := Dial(ctx, directory)
	if err != nil {
		return nil, err
	}
	process, err := linux.OpenProcess(pid, started)
	if err != nil {
		c.Close()
		return nil, failure.As(failure.VMProcessGone, err)
	}
	p := &Prepared{process: process, launcher: c.conn}
	// A socket takes connections while its process ends: only an answer says that it is there.
	ctx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	if _, err := p.receive(ctx); err != nil {
		p.Kill()
		return nil, err
	}
	return p, nil
}

// Start makes the process a VM and returns when its guest is ready. When it fails,
// or ctx ends before, the process is gone. The Prepared is used up in either case.
func (p *Prepared) Start(ctx context.Context, c StartConfig) (*Started, error) {
	started, err := p.start(ctx, c)
	if err != nil {
		p.Kill()
		return nil, err
	}
	started.Timeline.End(phaseAnswer)
	if c.Attached {
		started.launcher = p.launcher
		p.launcher = nil
	}
	p.close()
	return started, nil
}

func (p *Prepared) start(ctx context.Context, c StartConfig) (*Started, error) {
	if err := c.send(p.launcher); err != nil {
		return nil, err
	}
	resp, err := p.receive(ctx)
	if err != nil {
		return nil, err
	}
	if resp.Started == nil {
		return nil, failure.New(failure.Internal, "vm process gave no answer to start")
	}
	return resp.Started, nil
}

func (p *Prepared) receive(ctx context.Context) (*response, error) {
	resp, files, err := receive(ctx, p.launcher)
	linux.CloseFiles(files...)
	return resp, err
}

func (c *StartConfig) send(launcher *conn) error {
	var t table
	form, state, err := c.form(&t)
	if err != nil {
		return err
	}
	defer linux.CloseFiles(state)
	return sent(launcher.send(request{Op: opStart, Start: form}, t.files))
}

// form adds the files to a message. The state travels in a file, which the caller closes
// after sending; nil if there is none.
func (c *StartConfig) form(t *table) (*startForm, *os.File, error) {
	form := &startForm{
		Kernel:       t.add(c.Kernel),
		Initrd:       t.add(c.Initrd),
		Identity:     c.Identity,
		Network:      c.Network,
		Tap:          c.Tap,
		ReadyTimeout: c.ReadyTimeout,
		Attached:     c.Attached,
		Tops:         t.addAll(c.Tops),
		WorkingSet:   t.addWorkingSet(c.WorkingSet),
	}
	if c.Checkpoint == nil {
		return form, nil, nil
	}
	checkpoint, state, err := t.addCheckpoint(c.Checkpoint)
	form.Checkpoint = &checkpoint
	return form, state, err
}

// Kill ends the process. It is for a process that was not started, and does
// nothing for others.
func (p *Prepared) Kill() {
	if p.process != nil {
		// Not an error if it is gone already.
		_ = p.process.Signal(syscall.SIGKILL)
	}
	p.close()
}

// close lets go of the process.
func (p *Prepared) close() {
	if p.process != nil {
		p.process.Close()
		p.process = nil
	}
	if p.launcher != nil {
		p.launcher.Close()
		p.launcher = nil
	}
}

// Release ends an attached VM. For others it does nothing. It is idempotent.
func (s *Started) Release() {
	if s.launcher != nil {
		s.launcher.Close()
	}
}
