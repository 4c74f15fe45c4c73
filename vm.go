package forkvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// DefaultMemoryBytes is the RAM of a machine whose Config names none.
const DefaultMemoryBytes = 512 << 20

// Config says what a machine is like. The zero value is one vCPU with
// DefaultMemoryBytes of RAM.
type Config struct {
	// Name is the guest's hostname, "forkvm" if empty.
	Name string
	// CPUs is the number of vCPUs, 1 to 32; 0 means 1. Restore and Fork ignore
	// it: a clone has its parent's.
	CPUs int
	// MemoryBytes is the size of RAM, a multiple of 2 MiB; 0 means
	// DefaultMemoryBytes. Restore and Fork ignore it.
	MemoryBytes uint64
	// Prepared, if set, is what Prepare has made ahead for this number of vCPUs. It
	// is used up, also by a machine that fails.
	Prepared *Prepared
	// FrozenTime lets a clone's wall clock go on from the snapshot instead of
	// showing the host's time, for runs that can be repeated.
	FrozenTime bool
	// Headroom is how many bytes the memory limit of this process's control group has
	// to leave for the machine, if it has a limit; otherwise Boot, Restore and Fork fail
	// with a *MemoryLimitError and have done nothing. 0 means 8 MiB for each machine
	// that a call makes, and once the RAM of one; Unlimited that nobody looks. For a
	// fork the first configuration's counts, for the machine that is forked, too.
	Headroom int64
	// TempDir is where what the guest writes to its disks is kept, in files
	// without a name, until Close; os.TempDir() if empty.
	TempDir string
	// Console gets what the guest writes to its serial console, from one
	// goroutine. Output is dropped while a slow writer has not taken the last.
	Console io.Writer
	// OnDiskError, if set, hears of errors of the host's storage, which the guest
	// sees as I/O errors: errors.Is(err, syscall.ENOSPC) says that the host's disk
	// is full. The machine goes on, and writes work again when there is space. It
	// is called on the disk's own goroutine and must be quick.
	OnDiskError func(disk string, err error)
	// Vsock, if set, is a listening Unix socket at which other programs reach
	// ports of the guest: they send "CONNECT <port>\n" and read "OK <port>\n".
	// The machine closes it.
	Vsock net.Listener
	// Connect, if set, opens the host's end when a program in the guest
	// connects to a vsock port of the host (CID 2). The connection must have a
	// descriptor, as those of Unix sockets and TCP have.
	Connect func(ctx context.Context, port uint32) (net.Conn, error)
	// Network, if set, gives a machine that is booted a network card, and makes what is behind it. For a clone of a machine
	// with a card it is needed, too; a child of a fork has its parent's maker if it has none. What the guest may reach is no
	// part of a snapshot.
	Network NetworkMaker
}

// Unlimited is a Headroom that is not looked at.
const Unlimited = machine.Unlimited

// MemoryLimitError: what was asked for could exceed the memory limit of the control
// group of this process.
type MemoryLimitError = machine.MemoryLimitError

// VM is a running machine. Its methods may be called from any goroutine.
type VM struct {
	machine *machine.Machine
	tempDir string
	network NetworkMaker
	// identity is what the machine began with; a reset keeps all of it but the
	// generation.
	identity machine.Identity

	storing sync.Mutex // one snapshot after the other, so that each knows its parent

	// standing is held for checkpoints and resets: it guards what follows, which
	// belongs to the state that the machine is in.
	standing sync.Mutex
	lineage  []string // IDs of the snapshots that the machine stands on, nearest first
	origin   []string // those of what it came from
	life     int      // how often it was reset
}

// Boot starts a machine from an image and returns when its guest agent answers.
// When ctx ends before, the machine is gone.
func Boot(ctx context.Context, img *image.Image, c Config) (*VM, error) {
	checkpoint, kernel, err := machine.FromImage(img, filepath.Base(img.Dir()), machine.Size{
		CPUs:        max(c.CPUs, 1),
		MemoryBytes: orDefault(c.MemoryBytes),
		NetworkMTU:  c.mtu(),
	})
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", img.Dir(), err)
	}
	vm, err := startInLimit(ctx, checkpoint, kernel, c)
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", img.Dir(), err)
	}
	return vm, nil
}

func orDefault(memory uint64) uint64 {
	if memory == 0 {
		return DefaultMemoryBytes
	}
	return memory
}

// Restore starts a new machine from a snapshot and returns when its guest agent
// has confirmed the new identity.
func Restore(ctx context.Context, st *store.Store, name string, c Config) (*VM, error) {
	return restore(ctx, st, name, nil, c)
}

// restore is Restore; judges is set for a machine in which is judged.
func restore(ctx context.Context, st *store.Store, name string, judges *judgeMachines, c Config) (*VM, error) {
	checkpoint, manifest, err := machine.FromStore(ctx, st, name, false)
	if err != nil {
		return nil, err
	}
	checkpoint.WorkingSet = st.WorkingSet(manifest)
	if judges != nil {
		checkpoint.UseJudgingSet(st, manifest, true)
	}
	vm, err := startInLimit(ctx, checkpoint, nil, c)
	if err != nil {
		return nil, fmt.Errorf("restore %s: %w", name, err)
	}
	vm.lineage = manifest.Lineage()
	vm.origin = vm.lineage
	return vm, nil
}

// Fork makes one new machine for each configuration, from one short pause of
// this one, which goes on. Either all start or none is left.
func (vm *VM) Fork(ctx context.Context, configs ...Config) ([]*VM, error) {
	return vm.fork(ctx, nil, configs...)
}

// fork is Fork; judges is set for machines in which is judged.
func (vm *VM) fork(ctx context.Context, judges *judgeMachines, configs ...Config) ([]*VM, error) {
	demand := machine.Demand{VMs: len(configs) + 1, RAM: vm.machine.Shape().MemoryBytes, Freeze: true}
	if len(configs) > 0 {
		demand.Headroom = configs[0].Headroom
	}
	// Before the machine is stopped for nothing.
	if err := demand.Check(os.Getpid(), 0); err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	checkpoint, lineage, _, err := vm.checkpoint()
	if err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	defer checkpoint.Close()
	if judges != nil {
		judges.useJudgingSet(checkpoint, lineage)
	}
	children, errs := make([]*VM, len(configs)), make([]error, len(configs))
	var all sync.WaitGroup
	for i, c := range configs {
		all.Go(func() {
			if c.Network == nil {
				c.Network = vm.network
			}
			if children[i], errs[i] = startClone(ctx, checkpoint, c); errs[i] != nil {
				errs[i] = fmt.Errorf("fork %s: %w", c.Name, errs[i])
				return
			}
			children[i].lineage, children[i].origin = lineage, lineage
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, child := range children {
			if child != nil {
				err = errors.Join(err, child.Close())
			}
		}
		return nil, err
	}
	return children, nil
}

func startClone(ctx context.Context, checkpoint *machine.Checkpoint, c Config) (*VM, error) {
	clone, err := checkpoint.Clone()
	if err != nil {
		return nil, err
	}
	return start(ctx, clone, nil, c)
}

// startInLimit is start unless the control group's limit could be exceeded.
func startInLimit(ctx context.Context, checkpoint *machine.Checkpoint, kernel *machine.Kernel, c Config) (*VM, error) {
	demand := machine.Demand{VMs: 1, RAM: checkpoint.Shape.MemoryBytes, Headroom: c.Headroom}
	if err := demand.Check(os.Getpid(), 0); err != nil {
		config := c.machine(checkpoint, kernel)
		return nil, errors.Join(err, config.Close())
	}
	return start(ctx, checkpoint, kernel, c)
}

// start makes a machine of a checkpoint, which it takes over.
func start(ctx context.Context, checkpoint *machine.Checkpoint, kernel *machine.Kernel, c Config) (*VM, error) {
	config := c.machine(checkpoint, kernel)
	vm := &VM{tempDir: c.TempDir, network: c.Network, identity: machine.NewIdentity(c.hostname(), c.time())}
	if vm.tempDir == "" {
		vm.tempDir = os.TempDir()
	}
	err := c.addNetwork(&config, vm.identity)
	if err == nil {
		err = vm.create(&config, vm.identity)
	}
	if err != nil {
		return nil, errors.Join(err, config.Close())
	}
	if err := vm.machine.Bring(ctx, vm.identity); err != nil {
		return nil, errors.Join(err, vm.Close())
	}
	return vm, nil
}

// machine is the configuration of a machine that is made of a checkpoint, which it takes
// over.
func (c *Config) machine(checkpoint *machine.Checkpoint, kernel *machine.Kernel) machine.Config {
	config := machine.Config{
		Prepared: c.Prepared.take(),
		Kernel:   kernel,
		Console:  c.Console,
		Vsock:    machine.Vsock{Listener: c.Vsock, Connect: c.Connect},

		OnDiskError: c.OnDiskError,
	}
	checkpoint.Configure(&config)
	return config
}

func (vm *VM) create(config *machine.Config, id machine.Identity) (err error) {
	if config.Generation, err = id.GenerationID(); err != nil {
		return err
	}
	if config.Tops, err = machine.NewTops(config.Shape, vm.tempDir); err != nil {
		return err
	}
	if config.Prepared == nil {
		p, err := Prepare(config.Shape.CPUs)
		if err != nil {
			return err
		}
		config.Prepared = p.take()
	}
	vm.machine, err = machine.New(*config)
	*config = machine.Config{}
	return err
}

func (c *Config) hostname() string {
	if c.Name == "" {
		return "forkvm"
	}
	return c.Name
}

func (c *Config) time() machine.Time {
	if c.FrozenTime {
		return machine.TimeFrozen
	}
	return machine.TimeHost
}

// checkpoint takes one and returns, beside the checkpoint, what the machine stood on then and
// the number of its life.
func (vm *VM) checkpoint() (c *machine.Checkpoint, lineage []string, life int, err error) {
	tops, err := machine.NewTops(vm.machine.Shape(), vm.tempDir)
	if err != nil {
		return nil, nil, 0, err
	}
	vm.standing.Lock()
	defer vm.standing.Unlock()
	c, err = vm.machine.Checkpoint(tops)
	if err == nil && c.Compactable {
		vm.compact()
	}
	return c, vm.lineage, vm.life, err
}

// compact merges layers of disks. Long stacks, for want of space, cost time and nothing
// else.
func (vm *VM) compact() {
	if files, err := machine.NewTops(vm.machine.Shape(), vm.tempDir); err == nil {
		_ = vm.machine.Compact(files)
	}
}

// Snapshot freezes the machine into a store under a name, and returns what was
// stored. The machine stands still for the freeze only, not while layers are
// written. A machine that was paused stays so. Agent().WaitFor waits until the guest
// has reached what it is to have reached before.
//
// It costs what changed since the machine's last snapshot, which is its parent:
// take one after each step of a long run, and restore any of them later.
func (vm *VM) Snapshot(ctx context.Context, st *store.Store, name string) (*snapshot.Manifest, error) {
	vm.storing.Lock()
	defer vm.storing.Unlock()
	checkpoint, lineage, life, err := vm.checkpoint()
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", name, err)
	}
	defer checkpoint.Close()
	stored, err := checkpoint.Store(ctx, st, machine.Label{Name: name, Lineage: lineage})
	if err != nil {
		return nil, err
	}
	vm.standing.Lock()
	defer vm.standing.Unlock()
	if vm.life == life {
		vm.lineage = stored.Manifest.Lineage()
	}
	return stored.Manifest, nil
}

// Reset puts the machine back to what it was restored or forked from, and returns
// when its guest agent has confirmed the new identity: as a new clone, but in
// place, with the same name and in a fraction of the time. What ran in it is gone,
// its connections are closed, and clients that Agent returned before are refused.
// A machine that was paused is paused again afterwards.
//
// A booted machine has nothing to go back to; ResetTo gives it something. When a
// reset that has begun cannot be finished, or ctx ends before it is, the machine
// has ended.
func (vm *VM) Reset(ctx context.Context) error { return vm.reset(ctx, nil, nil) }

// ResetTo is Reset to a snapshot of the machine, or of another machine of the same
// tree: one with the same vCPUs, memory, disks and kernel. From then on that is
// what the machine came from.
func (vm *VM) ResetTo(ctx context.Context, st *store.Store, name string) error {
	checkpoint, manifest, err := machine.FromStore(ctx, st, name, false)
	if err != nil {
		return err
	}
	return vm.reset(ctx, checkpoint, manifest.Lineage())
}

// reset takes over the checkpoint, nil for what the machine came from.
func (vm *VM) reset(ctx context.Context, to *machine.Checkpoint, lineage []string) error {
	tops, err := machine.NewTops(vm.machine.Shape(), vm.tempDir)
	if err != nil {
		if to != nil {
			err = errors.Join(err, to.Close())
		}
		return err
	}
	vm.standing.Lock()
	defer vm.standing.Unlock()
	if _, err := vm.machine.Reset(ctx, machine.Target{To: to, Tops: tops, Identity: vm.identity.Next()}); err != nil {
		return err
	}
	if to != nil {
		vm.origin = lineage
	}
	vm.lineage, vm.life = vm.origin, vm.life+1
	return nil
}

// SetBalloon asks the guest to give up so many bytes of its RAM, in a balloon, or to
// take back what is more; 0 takes back all. Memory in the balloon takes none of the
// host's, and is in no snapshot. SetBalloon does not wait for the guest, which does what it
// can: Balloon says how far it is. A clone has its parent's balloon, and a reset brings back
// the one of the snapshot.
func (vm *VM) SetBalloon(bytes uint64) { vm.machine.SetBalloon(bytes) }

// Balloon is what a guest has been asked to give back, and has given back.
type Balloon = machine.Balloon

// Balloon returns what the guest has given back.
func (vm *VM) Balloon() Balloon { return vm.machine.Balloon() }

// Agent returns a client of the guest agent, with which commands are run and
// files are copied.
func (vm *VM) Agent() *client.Client { return vm.machine.Agent() }

// Dial connects to a vsock port on which a program in the guest listens. TCP ports
// and Unix sockets of the guest are reached with Agent().Dial.
func (vm *VM) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return vm.machine.Dial(ctx, port)
}

// Pause stops the guest until Resume. Pausing a paused machine does nothing.
func (vm *VM) Pause() error { return vm.machine.Pause() }

// Resume lets a paused guest go on.
func (vm *VM) Resume() error { return vm.machine.Resume() }

// Done is closed when the guest's life is over.
func (vm *VM) Done() <-chan struct{} { return vm.machine.Done() }

// Exit returns why the guest's life is over, nil before Done.
func (vm *VM) Exit() *vmm.Exit { return vm.machine.Exit() }

// Close ends the guest and returns when every thread, mapping and descriptor of
// the machine is gone. It is idempotent.
func (vm *VM) Close() error {
	if vm.machine == nil {
		return nil
	}
	return vm.machine.Close()
}
