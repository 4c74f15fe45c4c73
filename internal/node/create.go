package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/kvm/probe"
	"github.com/forkvm/forkvm/snapshot"
)

// DefaultReadyTimeout bounds the wait for a guest agent's first answer.
const DefaultReadyTimeout = 2 * time.Minute

// Options say how a VM is made.
type Options struct {
	// Name is the VM's name and its guest's hostname; one is made up if empty.
	Name string
	// Time is what a clone's wall clock shows; machine.TimeHost if empty.
	Time machine.Time
	// ReadyTimeout is DefaultReadyTimeout if 0.
	ReadyTimeout time.Duration
	// Attached makes the VM end with the calling process, however that ends. With Passing
	// nothing of it is left then: if the process cannot remove it any more, whoever lists
	// VMs next does.
	Attached, Passing bool
	// Verify checks all of a snapshot's data before it is used, which reads it.
	Verify bool
	// CPUs and MemoryBytes are for a boot from an image; a clone has its parent's.
	CPUs        int
	MemoryBytes uint64
	// CommandLine is added to the image's own, for a boot from an image.
	CommandLine string
	// Headroom is how many bytes there must be for the VM in the control group that it
	// is made in, see machine.Demand. One that could exceed the group's limit is
	// refused, with failure.MemoryLimit.
	Headroom int64
	// Recording is what is kept of what is done to the VM. If empty, that of the
	// parent for a fork, otherwise RecordJournal.
	Recording Recording
	// Network says what the VM may reach. Nil: a boot from an image makes a VM without a network card; a VM of a snapshot that
	// has one may reach nothing; a child of a fork what its parent may.
	Network *policy.Policy
	// NetworkMTU is the size of the largest packet of the card, for a boot from an image; machine.DefaultMTU if 0.
	NetworkMTU int
	// Ports are published on this host; a boot from an image makes a VM with a network card for them, too. No clone has its
	// parent's.
	Ports []policy.Port
	// Backend is what is behind the network card: that of the parent for a fork if empty, otherwise BackendUser.
	Backend Backend
	// Enforce says who enforces Network: that of the parent for a fork if empty, otherwise EnforceAuto.
	Enforce Enforcer
	// judges is the task's snapshot, for a VM in which is judged.
	judges *snapshot.Manifest
}

// demand is that of VMs with so much RAM, made with the same options.
func (o *Options) demand(vms int, ram uint64) machine.Demand {
	return machine.Demand{VMs: vms, RAM: ram, Headroom: o.Headroom}
}

func (o *Options) setDefaults() {
	if o.Time == "" {
		o.Time = machine.TimeHost
	}
	if o.ReadyTimeout == 0 {
		o.ReadyTimeout = DefaultReadyTimeout
	}
	if o.Recording == "" {
		o.Recording = RecordJournal
	}
	if o.Backend == "" {
		o.Backend = BackendUser
	}
	if o.Enforce == "" {
		o.Enforce = EnforceAuto
	}
}

// Boot starts a VM from an image of the node and returns when its guest agent
// answers.
func (n *Node) Boot(ctx context.Context, imageName string, o Options) (*VM, error) {
	o.setDefaults()
	course := begin()
	if err := checkMemory(o.MemoryBytes); err != nil {
		return nil, err
	}
	img, err := n.Image(imageName)
	if err != nil {
		return nil, err
	}
	checkpoint, kernel, err := machine.FromImage(img.Image, imageName, machine.Size{
		CPUs: o.CPUs, MemoryBytes: o.MemoryBytes, CommandLine: o.CommandLine, NetworkMTU: o.cardMTU(),
	})
	if err != nil {
		return nil, failure.As(failure.ImageInvalid, err)
	}
	defer checkpoint.Close()
	defer kernel.Close()
	release, err := n.admit(o.demand(1, checkpoint.Shape.MemoryBytes))
	if err != nil {
		return nil, err
	}
	defer release()
	course.End(phaseImage)
	return n.launch(ctx, o, plan{
		course:     course,
		checkpoint: checkpoint,
		kernel:     kernel,
		origin:     func(r *Record) { r.Image = imageName },
		created:    journal.Created{Image: imageName},
	})
}

// checkMemory refuses what this host cannot hold: a guest that is promised more
// than there is would be killed in the middle of its work.
func checkMemory(size uint64) error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return failure.As(failure.Internal, fmt.Errorf("read host memory: %w", err))
	}
	if total := info.Totalram * uint64(info.Unit); size > total {
		return failure.New(failure.InvalidArgument, "%d MiB of memory: this host has %d MiB", size>>20, total>>20)
	}
	return nil
}

// Restore starts a VM from a snapshot of the node and returns when its guest
// agent has confirmed its identity.
func (n *Node) Restore(ctx context.Context, snapshotName string, o Options) (*VM, error) {
	o.setDefaults()
	course := begin()
	snapshotName, err := n.snapshotName(snapshotName)
	if err != nil {
		return nil, err
	}
	if vm, err := n.perform(ctx, course, snapshotName, o); vm != nil || err != nil {
		return vm, err
	}
	checkpoint, manifest, err := n.openForClone(ctx, snapshotName, o.Verify)
	if err != nil {
		return nil, err
	}
	defer checkpoint.Close()
	release, err := n.admit(o.demand(1, checkpoint.Shape.MemoryBytes))
	if err != nil {
		return nil, err
	}
	defer release()
	if o.judges != nil {
		checkpoint.UseJudgingSet(n.store, manifest, true)
	}
	course.End(phaseSnapshot)
	l := planOf(course, manifest)
	l.checkpoint = checkpoint
	return n.launch(ctx, o, l)
}

// openForClone opens a snapshot, and what makes its clones faster.
func (n *Node) openForClone(ctx context.Context, name string, verify bool) (*machine.Checkpoint, *snapshot.Manifest, error) {
	checkpoint, manifest, err := machine.FromStore(ctx, n.store, name, verify)
	if err != nil {
		return nil, nil, snapshotFailure(err)
	}
	checkpoint.WorkingSet = n.store.WorkingSet(manifest)
	checkpoint.HugePages = n.hugePages(manifest, checkpoint)
	return checkpoint, manifest, nil
}

// planOf is that of a clone of a snapshot, without the checkpoint.
func planOf(course course, m *snapshot.Manifest) plan {
	return plan{course: course, created: createdFrom(m), origin: func(r *Record) {
		r.Snapshot, r.Image = m.Name, m.Image
		r.Standing = standingOn(m)
	}}
}

// createdFrom is what the journals of the snapshot's VMs say of it.
func createdFrom(m *snapshot.Manifest) journal.Created {
	c := journal.Created{Image: m.Image, Snapshot: m.Name, SnapshotID: m.ID, Task: m.Task}
	if h := m.Journal; h != nil {
		c.SnapshotOf = &journal.Origin{Rollout: h.Rollout, Head: journal.Head{Seq: h.Seq, Hash: h.Hash}}
	}
	return c
}

// Child is one result of a fork: a VM, or why there is none.
type Child struct {
	VM  *VM
	Err error
}

// Fork makes a VM for each of the options from one short pause of a running VM,
// which goes on. Each succeeds or fails on its own. The error is for what
// happens before there are children. The first one's headroom is that of all.
func (n *Node) Fork(ctx context.Context, parent *VM, options []Options) ([]Child, error) {
	course := begin()
	if len(options) > 0 {
		// Before the parent is stopped for nothing.
		release, err := n.admitFork(parent, options[0].demand(len(options), parent.Shape.MemoryBytes))
		if err != nil {
			return nil, fmt.Errorf("fork vm (%s): %w", parent.Name, err)
		}
		defer release()
	}
	checkpoint, err := parent.checkpoint(ctx)
	if err != nil {
		return nil, err
	}
	defer checkpoint.Close()
	created, err := parent.asOrigin()
	if err != nil {
		return nil, err
	}
	if len(options) == 1 && options[0].judges != nil && parent.Record.Snapshot == options[0].judges.Name {
		checkpoint.UseJudgingSet(n.store, options[0].judges, false)
	}
	rehearsed := parent.rehearsedAs()
	course.End(phaseCheckpoint)
	children := make([]Child, len(options))
	done := make(chan struct{})
	for i, o := range options {
		go func() {
			if o.Recording == "" {
				o.Recording = parent.Recording
			}
			if o.Backend == "" {
				o.Backend = parent.Backend()
			}
			if o.Enforce == "" {
				o.Enforce = parent.enforcedAs()
			}
			o.setDefaults()
			if o.Network == nil {
				o.Network = parent.Record.Network
			}
			children[i].VM, children[i].Err = n.launch(ctx, o, plan{
				course:     course.clone(),
				checkpoint: checkpoint,
				origin: func(r *Record) {
					r.Parent, r.Image, r.Snapshot = parent.ID, parent.Image, parent.Record.Snapshot
					r.ParentPauseMS = milliseconds(checkpoint.Pause)
					r.Standing = parent.Standing
				},
				created:   created,
				rehearsed: rehearsed,
			})
			done <- struct{}{}
		}()
	}
	for range options {
		<-done
	}
	if err := parent.noteFork(children, checkpoint); err != nil {
		return nil, err
	}
	return children, nil
}

// asOrigin is what the journals of the VM's children say of it.
func (vm *VM) asOrigin() (journal.Created, error) {
	head, err := vm.head()
	return journal.Created{
		Parent: vm.ID, Image: vm.Image, Snapshot: vm.Record.Snapshot, ParentSeq: head.Seq, ParentHash: head.Hash,
	}, err
}

// head is the last line of the VM's journal, the zero value if it has none.
func (vm *VM) head() (journal.Head, error) {
	if !vm.recorded() {
		return journal.Head{}, nil
	}
	return vm.rollout().head()
}

// noteFork tells the parent's journal of its children. A fork that cannot be put on
// record has not been.
func (vm *VM) noteFork(children []Child, checkpoint *machine.Checkpoint) error {
	what := journal.Forked{Children: []string{}, PauseMS: milliseconds(checkpoint.Pause)}
	for _, c := range children {
		if c.Err == nil {
			what.Children = append(what.Children, c.VM.ID)
		}
	}
	_, err := vm.Note(journal.EventForked, what)
	if err == nil {
		return nil
	}
	for _, c := range children {
		if c.Err == nil {
			err = errors.Join(err, c.VM.Remove(context.Background(), true))
		}
	}
	return err
}

// checkpoint freezes the VM for a moment.
func (vm *VM) checkpoint(ctx context.Context) (*machine.Checkpoint, error) {
	c, err := vm.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	tops, err := machine.NewTops(vm.Shape, vm.node.tmpDir())
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	defer linux.CloseFiles(tops...)
	checkpoint, err := c.Checkpoint(ctx, tops)
	if err == nil && checkpoint.Compactable {
		vm.compact(ctx, c)
	}
	return checkpoint, err
}

// compact has the VM process merge layers of its disks, now and then one of many
// checkpoints. Long stacks, for want of space, cost time and nothing else.
func (vm *VM) compact(ctx context.Context, c *process.Client) {
	if files, err := machine.NewTops(vm.Shape, vm.node.tmpDir()); err == nil {
		defer linux.CloseFiles(files...)
		_ = c.Compact(ctx, files)
	}
}

// plan says what a VM process starts from.
type plan struct {
	course     course              // so far
	checkpoint *machine.Checkpoint // borrowed
	kernel     *machine.Kernel     // borrowed; nil for a clone
	origin     func(*Record)
	created    journal.Created // what it began from, for its journal
	// rehearsed is the ID of a snapshot from which it is not far; empty if there is none.
	rehearsed string
}

// launch makes the VM's directory and process. It leaves nothing behind when it
// fails.
func (n *Node) launch(ctx context.Context, o Options, l plan) (*VM, error) {
	card, err := o.card(l.checkpoint.Shape)
	if err != nil {
		return nil, err
	}
	tops, err := machine.NewTops(l.checkpoint.Shape, n.tmpDir())
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	defer linux.CloseFiles(tops...)
	d, err := n.draft(ctx, o, l)
	if err != nil {
		return nil, err
	}
	d.record.Shape = l.checkpoint.Shape
	d.give(card, &o)
	config := process.StartConfig{Checkpoint: l.checkpoint, Tops: tops, Network: card.network}
	if l.kernel != nil {
		config.Kernel, config.Initrd = l.kernel.Image, l.kernel.Initrd
	}
	return d.begin(ctx, o, l, config)
}

// begin makes the draft's process a VM, and leaves nothing of it when it fails. What is
// the VM's own is added to the configuration.
func (d *draft) begin(ctx context.Context, o Options, l plan, config process.StartConfig) (*VM, error) {
	var err error
	if o.Attached && o.Passing {
		if d.record.Owner, err = thisProcess(); err != nil {
			d.abandon()
			return nil, err
		}
	}
	d.record.Identity = machine.NewIdentity(d.record.Name, o.Time)
	l.origin(&d.record)
	d.record.Origin = d.record.Standing
	if err := d.beginRecord(o, l.created); err != nil {
		d.abandon()
		return nil, err
	}
	config.Identity, config.ReadyTimeout, config.Attached = d.record.Identity, o.ReadyTimeout, o.Attached
	l.course.End(phaseDirectory)
	started, err := d.start(ctx, config)
	if err == nil {
		d.node.prove()
		var vm *VM
		if vm, err = d.finish(started, l.course.phases(started)); err == nil {
			return vm, nil
		}
	}
	d.abandon()
	return nil, failure.As(failure.Internal, fmt.Errorf("create vm (%s): %w", d.record.Name, err))
}

// slowStart is when a start is taken for one that may never succeed. A restored
// guest answers long before, a booting one on real hardware soon after.
const slowStart = time.Second

// startWatched starts a prepared VM process. If its guest is not ready soon, and none
// ever was, it finds out whether this /dev/kvm can run Linux at all, which some hosts'
// emulated ones cannot: such a guest would run until its time is up.
func (n *Node) startWatched(ctx context.Context, p *process.Prepared, config process.StartConfig) (*process.Started, error) {
	if n.proven() {
		return p.Start(ctx, config)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	probed := make(chan struct{})
	timer := time.AfterFunc(slowStart, func() {
		defer close(probed)
		if err := checkKVM(ctx); err != nil {
			cancel(err)
		}
	})
	started, err := p.Start(ctx, config)
	if !timer.Stop() {
		<-probed
	}
	return started, err
}

// checkKVM returns an error if /dev/kvm cannot run Linux. That it could not find
// out is none.
func checkKVM(ctx context.Context) error {
	device, err := openKVM()
	if err != nil {
		return nil
	}
	defer device.Close()
	system, err := kvm.OpenFile(device)
	if err != nil {
		return failure.As(failure.KVMUnusable, err)
	}
	defer system.Close()
	report, err := probe.Run(ctx, system)
	var unusable *probe.UnusableError
	if err != nil || !errors.As(report.Err(), &unusable) {
		return nil
	}
	return failure.New(failure.KVMUnusable, "%w: %s", unusable, unusable.Fix())
}

func openKVM() (*os.File, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, fs.ErrNotExist):
		return nil, failure.New(failure.KVMUnusable, "/dev/kvm does not exist: this host has no KVM; 'forkvm doctor' says what to do")
	case errors.Is(err, fs.ErrPermission):
		return nil, failure.New(failure.KVMUnusable, "no permission to use /dev/kvm: join the group that owns it; 'forkvm doctor' says what to do")
	}
	return nil, failure.New(failure.KVMUnusable, "%w: 'forkvm doctor' says what to do", err)
}
