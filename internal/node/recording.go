package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/process"
)

// Recording says what is kept of what is done to a VM.
type Recording string

const (
	RecordNone    Recording = "none"
	RecordJournal Recording = "journal"
	// RecordSteps takes a snapshot behind each operation of the guest agent that
	// changes the guest, too.
	RecordSteps Recording = "steps"
)

// How much is kept of what a command writes, for each stream, and of what goes into
// a guest, for each operation, in bytes.
const (
	keepOutput = 256 << 10
	keepInput  = 1 << 20
)

// Note adds a line to the VM's journal and returns it as the new head. It does
// nothing if the VM has none.
func (vm *VM) Note(event string, data any) (journal.Head, error) {
	if !vm.recorded() {
		return journal.Head{}, nil
	}
	before := vm.noteRefusals()
	head, err := vm.rollout().Note(event, data)
	return head, errors.Join(before, err)
}

// noteRefusals adds what the guest was refused since that was done last, if there is something.
func (vm *VM) noteRefusals() error {
	if vm.Network == nil || !vm.recorded() {
		return nil
	}
	r, err := vm.takeRefusals()
	if err != nil {
		return err
	}
	return vm.noteRefused(r)
}

func (vm *VM) noteRefused(r journal.Refused) error {
	if r.Empty() {
		return nil
	}
	_, err := vm.rollout().Note(journal.EventRefused, r)
	return err
}

// takeRefusals asks the VM's process, or looks what it has left.
func (vm *VM) takeRefusals() (r journal.Refused, err error) {
	if vm.alive() {
		err = vm.call(context.Background(), func(c *process.Client, ctx context.Context) (err error) {
			r, err = c.Refusals(ctx)
			return err
		})
		if err == nil || vm.alive() && !failure.Is(err, failure.VMProcessGone) {
			return r, err
		}
	}
	// It ends right now, or has: a process that was killed has left nothing.
	return process.TakeRefusals(vm.dir)
}

func (vm *VM) recorded() bool { return vm.Recording != RecordNone && vm.Recording != "" }

func (vm *VM) rollout() *Rollout { return vm.node.rollout(vm.ID) }

// beginRecord makes the journal of a VM that is about to start, so that nothing
// happens in it before there is one.
func (d *draft) beginRecord(o Options, from journal.Created) error {
	d.record.Recording = o.Recording
	if o.Recording == RecordNone {
		return nil
	}
	r := d.node.rollout(d.record.ID)
	j, err := journal.Create(r.dir, r.id)
	if err != nil {
		return failure.As(failure.Internal, err)
	}
	defer j.Close()
	from.VM, from.Name, from.Generation = d.record.ID, d.record.Name, d.record.Identity.Generation
	from.CPUs, from.MemoryBytes, from.KernelArgs = d.record.Shape.CPUs, d.record.Shape.MemoryBytes, o.CommandLine
	from.Time, from.Network = string(d.record.Identity.Time), d.record.Network
	from.Recording, from.Version = string(o.Recording), d.node.config.Version
	if _, err := j.Append(journal.EventCreated, from); err != nil {
		return failure.As(failure.Internal, err)
	}
	return nil
}

// observer is what a VM's guest agent is asked through: each operation that may
// change the guest is in the journal before it is done. Its VM is nobody else's and
// stays as it is.
type observer struct{ vm *VM }

// looks are operations that change nothing in a guest.
var looks = map[string]bool{
	proto.OpPing: true, proto.OpGet: true, proto.OpGetTree: true, proto.OpStat: true, proto.OpList: true,
	proto.OpUsage: true, proto.OpCommands: true, proto.OpScan: true, proto.OpSurvey: true,
	proto.OpRenew: true, // the VM's process asks for it, and each reset and fork is an event
}

// Begin implements client.Observer.
func (o observer) Begin(op, id string, params any) (client.Observation, error) {
	if looks[op] {
		return nil, nil
	}
	j, err := o.vm.rollout().open()
	if err != nil {
		return nil, err
	}
	what := operation(id, params)
	obs := &observation{vm: o.vm, journal: j, begun: time.Now(), taps: map[uint16]*journal.Tap{}}
	if op == proto.OpAttach {
		obs.done.ID = what.ID // it changes nothing, but brings a result
		return obs, nil
	}
	head, err := j.Append(op, what)
	if err != nil {
		j.Close()
		return nil, failure.As(failure.Internal, err)
	}
	obs.done.Of = head.Seq
	return obs, nil
}

// operation is what the journal says of a request.
func operation(id string, params any) journal.Operation {
	op := journal.Operation{ID: id}
	switch p := params.(type) {
	case proto.ExecRequest:
		op.Args, op.User, op.Groups, op.Dir, op.Limits = p.Args, p.User, p.Groups, p.Dir, p.Limits
		op.ClearEnv, op.Detached, op.Terminal, op.Stdin = p.ClearEnv, p.Detach, p.Terminal != nil, p.Stdin
		op.TimeoutMS, op.StdoutLimit, op.StderrLimit = p.TimeoutMS, p.StdoutLimit, p.StderrLimit
		op.MergedStreams = p.Stderr == proto.OutputStdout
		op.StdoutDiscarded, op.StderrDiscarded = p.Stdout == proto.OutputDiscard, p.Stderr == proto.OutputDiscard
		for _, e := range p.Env {
			name, _, _ := strings.Cut(string(e), "=")
			op.Env = append(op.Env, proto.Text(name))
		}
	case proto.PutRequest:
		op.Path, op.Mode, op.User = p.Path, p.Mode, p.User
	case proto.PutTreeRequest:
		op.Path, op.Owners = p.Path, p.Owners
	case proto.VacateRequest:
		for _, d := range p.Directories {
			op.Args = append(op.Args, d.Path)
		}
	case proto.RemoveRequest:
		op.Path, op.Recursive = p.Path, p.Recursive
	case proto.MoveRequest:
		op.Path, op.To = p.From, p.To
	case proto.AttachRequest:
		op.ID = p.ID
	case proto.SignalRequest:
		op.ID, op.Signal, op.All = p.ID, p.Signal, p.All
	case proto.ConnectRequest:
		op.Network, op.To = p.Network, p.Address
	case proto.ShutdownRequest:
		op.Action = p.Action
	}
	return op
}

// observation follows one operation to its end.
type observation struct {
	vm      *VM
	journal *journal.Journal
	begun   time.Time
	done    journal.Done

	mu   sync.Mutex
	taps map[uint16]*journal.Tap
	over bool
}

// Moved implements client.Observation.
func (o *observation) Moved(stream uint16, p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return
	}
	tap := o.taps[stream]
	if tap == nil {
		limit := keepOutput
		if stream == proto.Stdin {
			limit = keepInput
		}
		tap = o.journal.Tap(limit)
		o.taps[stream] = tap
	}
	tap.Write(p)
}

// End implements client.Observation.
func (o *observation) End(ctx context.Context, result *client.Result, err error) error {
	defer o.journal.Close()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over = true
	if o.done.Of == 0 && result == nil {
		return nil // nobody has waited for the command's end
	}
	o.done.WallMS = milliseconds(time.Since(o.begun))
	if err != nil {
		o.done.Error = err.Error()
	}
	o.done.Result = ResultOf(result)
	kept := errors.Join(o.keep(), o.vm.noteRefusals())
	step := o.takeStep(context.WithoutCancel(ctx))
	_, noted := o.journal.Append(journal.EventDone, o.done)
	if err := errors.Join(kept, step, noted); err != nil {
		return failure.As(failure.Internal, fmt.Errorf("record what was done: %w", err))
	}
	return nil
}

// keep stores what has passed by.
func (o *observation) keep() (err error) {
	for stream, to := range map[uint16]**journal.Contents{proto.Stdin: &o.done.Input, proto.Stdout: &o.done.Stdout, proto.Stderr: &o.done.Stderr} {
		tap := o.taps[stream]
		if tap == nil {
			continue
		}
		c, failed := tap.Contents()
		*to, err = c, errors.Join(err, failed)
	}
	return err
}

// ResultOf is what is on record of how a command ended, nil of none.
func ResultOf(r *client.Result) *journal.Result {
	if r == nil {
		return nil
	}
	result := &journal.Result{
		ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, OOMKilled: r.OOMKilled,
		StdoutDropped: r.StdoutDropped, StderrDropped: r.StderrDropped,
		DurationMS: r.DurationMS, PeakMemoryBytes: r.PeakMemoryBytes,
	}
	if r.Error != nil {
		result.Error = r.Error.Code
	}
	return result
}

// takeStep takes the snapshot behind an operation, if the VM has one behind each.
func (o *observation) takeStep(ctx context.Context) error {
	if o.vm.Recording != RecordSteps || o.done.Of == 0 {
		return nil
	}
	vm := *o.vm // others may be in takeStep, too
	s, err := vm.takeSnapshot(ctx, stepName(o.vm.ID, o.done.Of), "")
	if err != nil {
		o.done.Error = strings.TrimPrefix(o.done.Error+"; "+err.Error(), "; ")
		return err
	}
	o.done.Step, o.done.StepID = s.Manifest.Name, s.Manifest.ID
	return nil
}
