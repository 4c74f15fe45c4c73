package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/vmm"
)

// State is what a VM is doing, as far as it can be seen from outside.
type State string

const (
	Starting State = "starting" // its process is there, the guest is not ready yet
	Running  State = "running"
	Paused   State = "paused"
	Ended    State = "ended" // the guest's life is over; Exit says why
	Dead     State = "dead"  // the VM process is gone without a report
)

// VM is a VM of a node. It is a view of its record, which others may remove.
type VM struct {
	Record
	node *Node
	dir  string
	seen recordStamp // what Record is, zero if that is not known

	// started keeps an attached VM's launch socket open; nil for a VM that was
	// found.
	started *process.Started
}

// Status is what a VM is doing now.
type Status struct {
	State State     `json:"state"`
	Exit  *vmm.Exit `json:"exit,omitempty"`
	// Generation is what the guest has confirmed last; another one than the
	// record's says that the VM was reset since that was read.
	Generation string `json:"generation,omitempty"`
	// DiskError is the last error of the host's storage that the guest ran into.
	DiskError *failure.Error `json:"disk_error,omitempty"`
	// PrivateBytes is memory that the VM process shares with nobody: what the
	// guest wrote, and the process's own.
	PrivateBytes int64 `json:"private_bytes"`
}

// callTimeout bounds a request to a VM process that only looks or flips a switch.
const callTimeout = 10 * time.Second

// List returns all VMs of the node, oldest first, and removes what crashes left
// behind, of VMs that end with the process that made them too.
func (n *Node) List() ([]*VM, error) {
	entries, err := os.ReadDir(n.vmsDir())
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("list vms: %w", err))
	}
	var vms []*VM
	for _, e := range entries {
		dir := filepath.Join(n.vmsDir(), e.Name())
		r, err := readRecord(dir)
		if errors.Is(err, fs.ErrNotExist) {
			n.sweep(dir)
			continue
		}
		if err != nil {
			return nil, failure.As(failure.Internal, fmt.Errorf("list vms: %w", err))
		}
		if r.Name == "" { // somebody is just adopting it, or died doing so
			n.sweep(dir)
			continue
		}
		vm := &VM{Record: *r, node: n, dir: dir}
		if !vm.begun() {
			n.sweep(dir)
			if !exists(dir) {
				continue
			}
		}
		if vm.forsaken() && vm.clear() == nil {
			continue
		}
		vm.tidy()
		vms = append(vms, vm)
	}
	sort.SliceStable(vms, func(i, j int) bool { return vms[i].Created.Before(vms[j].Created) })
	return vms, nil
}

// Find returns the VM with this name, ID, or beginning of an ID that no other
// has.
func (n *Node) Find(ref string) (*VM, error) {
	vms, err := n.List()
	if err != nil {
		return nil, err
	}
	var found []*VM
	for _, vm := range vms {
		if vm.Name == ref || vm.ID == ref {
			return vm, nil
		}
		if len(ref) >= 3 && strings.HasPrefix(vm.ID, ref) {
			found = append(found, vm)
		}
	}
	switch len(found) {
	case 0:
		return nil, failure.New(failure.VMNotFound, "no vm named %q", ref)
	case 1:
		return found[0], nil
	}
	return nil, failure.New(failure.InvalidArgument, "%d vms have an id that begins with %q", len(found), ref)
}

// open returns the VM's process, linux.ErrProcessGone if it is not there any
// more. A process of an earlier boot of the host is gone whatever its number.
func (vm *VM) open() (*linux.Process, error) { return openProcess(vm.HostBoot, vm.PID, vm.Started) }

// openProcess opens a process of a boot of the host.
func openProcess(hostBoot string, pid int, started uint64) (*linux.Process, error) {
	boot, err := linux.BootID()
	if err != nil {
		return nil, err
	}
	if boot != hostBoot {
		return nil, linux.ErrProcessGone
	}
	return linux.OpenProcess(pid, started)
}

// alive reports whether the VM process is there.
func (vm *VM) alive() bool {
	return isThere(vm.open())
}

// isThere reports whether a process was opened, and closes it.
func isThere(p *linux.Process, err error) bool {
	if err != nil {
		return false
	}
	p.Close()
	return true
}

// begun reports whether the VM became ready or may still: one whose process died
// before is a failed start and not a VM.
func (vm *VM) begun() bool { return vm.ReadyMS != 0 || vm.alive() }

// forsaken reports whether the VM has ended and nobody is left who was to remove it.
func (vm *VM) forsaken() bool {
	if vm.Owner == nil || vm.alive() {
		return false
	}
	return !isThere(openProcess(vm.HostBoot, vm.Owner.PID, vm.Owner.Started))
}

// tidy removes the sockets of a VM whose process is gone, so that nobody waits
// for an answer from them.
func (vm *VM) tidy() {
	if vm.alive() {
		return
	}
	for _, path := range []string{filepath.Join(vm.dir, process.ControlSocket), vm.VsockPath()} {
		os.Remove(path)
	}
}

// Status looks at the VM process.
func (vm *VM) Status(ctx context.Context) (*Status, error) {
	st, err := vm.state(ctx)
	if err == nil && st.State != Ended && st.State != Dead {
		st.PrivateBytes = linux.PrivateBytes(vm.PID)
	}
	return st, err
}

// state is Status without what takes long to count.
func (vm *VM) state(ctx context.Context) (*Status, error) {
	if !vm.alive() {
		return vm.ended()
	}
	if vm.ReadyMS == 0 {
		return &Status{State: Starting}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := process.Dial(ctx, vm.dir)
	var st *process.Status
	if err == nil {
		defer c.Close()
		st, err = c.Status(ctx)
	}
	if failure.Is(err, failure.VMProcessGone) {
		return vm.ended() // it ended while we asked
	}
	if err != nil {
		return nil, err
	}
	return &Status{State: State(st.State), Exit: st.Exit, Generation: st.Generation, DiskError: st.DiskError}, nil
}

// ended is the status of a VM whose process is gone or about to go.
func (vm *VM) ended() (*Status, error) {
	exit, err := process.ReadExit(vm.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return &Status{State: Dead}, nil
	}
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return &Status{State: Ended, Exit: exit}, nil
}

// dial connects to the VM process.
func (vm *VM) dial(ctx context.Context) (*process.Client, error) {
	c, err := process.Dial(ctx, vm.dir)
	if err == nil {
		return c, nil
	}
	if !vm.alive() {
		return nil, failure.New(failure.VMNotRunning, "vm %s is not running", vm.Name)
	}
	return nil, err
}

// call makes one short request.
func (vm *VM) call(ctx context.Context, do func(*process.Client, context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := vm.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	return do(c, ctx)
}

// Pause stops the guest until Resume. Pausing twice is the same as once.
func (vm *VM) Pause(ctx context.Context) error {
	return vm.switchTo(ctx, (*process.Client).Pause, journal.EventPaused)
}

// Resume lets a paused guest go on.
func (vm *VM) Resume(ctx context.Context) error {
	return vm.switchTo(ctx, (*process.Client).Resume, journal.EventResumed)
}

func (vm *VM) switchTo(ctx context.Context, do func(*process.Client, context.Context) error, event string) error {
	if err := vm.call(ctx, do); err != nil {
		return err
	}
	_, err := vm.Note(event, struct{}{})
	return err
}

// killTimeout is how long a VM process may take to end itself.
const killTimeout = 2 * time.Second

// Kill ends the VM and returns when its process is gone. A process that does not
// end itself in time is killed. Killing a VM that has ended does nothing.
func (vm *VM) Kill(ctx context.Context) error {
	if vm.started != nil {
		defer vm.started.Release()
	}
	p, err := vm.open()
	if errors.Is(err, linux.ErrProcessGone) {
		return nil
	}
	if err != nil {
		return failure.As(failure.Internal, err)
	}
	defer p.Close()
	if err := vm.end(ctx, p); err != nil {
		return err
	}
	// An end that cannot be put on record comes all the same.
	_, _ = vm.Note(journal.EventEnded, vm.endForJournal())
	return nil
}

// end ends the VM's process.
func (vm *VM) end(ctx context.Context, p *linux.Process) error {
	polite, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := vm.call(polite, (*process.Client).Kill); err == nil {
		err = p.Wait(polite)
		if err == nil {
			return nil
		}
	}
	return vm.signal(ctx, p)
}

// signal ends the VM's process without a word to it.
func (vm *VM) signal(ctx context.Context, p *linux.Process) error {
	err := p.Signal(syscall.SIGKILL)
	if err == nil || errors.Is(err, linux.ErrProcessGone) {
		err = p.Wait(ctx)
	}
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("kill vm (%s): %w", vm.Name, err))
	}
	return nil
}

// endForJournal is why the VM has ended, as far as that is known.
func (vm *VM) endForJournal() journal.Ended {
	exit, err := process.ReadExit(vm.dir)
	if err != nil {
		return journal.Ended{Reason: string(Dead)}
	}
	return journal.Ended{Reason: string(exit.Reason), Detail: exit.Detail}
}

// Wait returns the report of the VM's end, for which it waits as long as ctx
// allows.
func (vm *VM) Wait(ctx context.Context) (*vmm.Exit, error) {
	p, err := vm.open()
	if err == nil {
		defer p.Close()
		err = p.Wait(ctx)
	}
	if err != nil && !errors.Is(err, linux.ErrProcessGone) {
		return nil, failure.As(failure.Internal, err)
	}
	st, err := vm.ended()
	if err != nil {
		return nil, err
	}
	if st.Exit == nil {
		return nil, failure.New(failure.VMProcessGone, "the process of vm %s died without a report; see %s", vm.Name, filepath.Join(vm.dir, process.LogFile))
	}
	return st.Exit, nil
}

// Remove removes an ended VM's directory and name. With force a running one is
// killed first.
func (vm *VM) Remove(ctx context.Context, force bool) error {
	if vm.alive() {
		if !force {
			return failure.New(failure.InvalidArgument, "vm %s is running; kill it first, or remove it by force", vm.Name)
		}
		if err := vm.Kill(ctx); err != nil {
			return err
		}
	}
	return vm.clear()
}

// clear removes the VM, which has ended.
func (vm *VM) clear() error {
	_, _ = vm.Note(journal.EventRemoved, vm.endForJournal()) // as in Kill
	return vm.erase()
}

// erase removes the VM's directory and name.
func (vm *VM) erase() error {
	if err := vm.node.removeGroup(filepath.Base(vm.dir)); err != nil {
		return err
	}
	vm.node.release(vm.Name, vm.ID)
	if err := os.RemoveAll(vm.dir); err != nil {
		return failure.As(failure.Internal, fmt.Errorf("remove vm (%s): %w", vm.Name, err))
	}
	return nil
}

// discard ends and removes a VM of which nothing is on record: nobody will ask how it
// ended.
func (vm *VM) discard(ctx context.Context) error {
	if vm.started != nil {
		defer vm.started.Release()
	}
	p, err := vm.open()
	if errors.Is(err, linux.ErrProcessGone) {
		return vm.erase()
	}
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("kill vm (%s): %w", vm.Name, err))
	}
	defer p.Close()
	if err := vm.signal(ctx, p); err != nil {
		return err
	}
	return vm.erase()
}

// VsockPath is the path of the Unix socket through which host programs reach the
// guest's ports ("CONNECT <port>\n").
func (vm *VM) VsockPath() string { return process.VsockPath(vm.dir) }

// Directory is the VM's own directory.
func (vm *VM) Directory() string { return vm.dir }

// Agent returns a client of the VM's guest agent, which expects the VM's own
// generation: a command for this VM is never run by another one. What it is asked
// is put on record.
func (vm *VM) Agent() *client.Client {
	config := client.Config{
		Dial:       func(ctx context.Context) (net.Conn, error) { return dialGuest(ctx, vm.VsockPath(), proto.Port) },
		Generation: vm.Identity.Generation,
	}
	if vm.recorded() {
		config.Observer = observer{&VM{Record: vm.Record, node: vm.node, dir: vm.dir}}
	}
	return client.New(config)
}
