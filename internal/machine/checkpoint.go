package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// Checkpoint is a machine at one moment: what a clone begins from. Its layers are
// immutable and shared with the machine that it was taken of; the handles on
// them are its own.
type Checkpoint struct {
	Shape Shape
	// State is nil for a machine that has not begun: a cold boot's checkpoint has
	// a shape and disks only.
	State *snapshot.State
	// Memory and Disks are the stacks of layers, bottom first.
	Memory []*layer.Layer
	Disks  [][]*layer.Layer
	// WorkingSet is what a clone will write first, nil if nobody knows.
	WorkingSet *store.WorkingSet
	// HugePages has some of the pages of Memory once more, nil if there are none.
	HugePages *HugePages
	// Pause is how long the machine stood still for it.
	Pause time.Duration
	// Compactable says that the machine has layers of disks that Compact would merge.
	Compactable bool
}

// Close closes the checkpoint's layers. Machines made from it do not need them.
func (c *Checkpoint) Close() error {
	errs := []error{closeLayers(c.Memory...)}
	for _, stack := range c.Disks {
		errs = append(errs, closeLayers(stack...))
	}
	if c.WorkingSet != nil {
		errs = append(errs, c.WorkingSet.Close())
	}
	if c.HugePages != nil {
		errs = append(errs, c.HugePages.Close())
	}
	c.Memory, c.Disks, c.WorkingSet, c.HugePages = nil, nil, nil, nil
	return errors.Join(errs...)
}

// Clone returns a checkpoint with handles of its own, so that several machines
// can be made from one.
func (c *Checkpoint) Clone() (*Checkpoint, error) {
	clone := &Checkpoint{Shape: c.Shape, State: c.State, Pause: c.Pause, Compactable: c.Compactable}
	var err error
	if clone.Memory, err = duplicate(c.Memory); err != nil {
		return nil, err
	}
	for _, stack := range c.Disks {
		layers, err := duplicate(stack)
		if err != nil {
			return nil, errors.Join(err, clone.Close())
		}
		clone.Disks = append(clone.Disks, layers)
	}
	if c.WorkingSet != nil {
		if clone.WorkingSet, err = c.WorkingSet.Dup(); err != nil {
			return nil, errors.Join(err, clone.Close())
		}
	}
	if c.HugePages != nil {
		if clone.HugePages, err = c.HugePages.Dup(); err != nil {
			return nil, errors.Join(err, clone.Close())
		}
	}
	return clone, nil
}

// Configure moves the checkpoint into a machine's configuration, which owns its
// layers from then on.
func (c *Checkpoint) Configure(config *Config) {
	config.Shape, config.State = c.Shape, c.State
	config.Memory, config.Disks, config.WorkingSet, config.HugePages = c.Memory, c.Disks, c.WorkingSet, c.HugePages
	c.Memory, c.Disks, c.WorkingSet, c.HugePages = nil, nil, nil, nil
}

// Checkpoint stops the machine, takes its state and freezes its memory and its
// disks in one pause, and lets it go on (unless it was paused before). tops has
// an empty file for each writable disk's new top layer and nil for the others.
// Checkpoint takes them over. When it fails the machine goes on as before.
func (m *Machine) Checkpoint(tops []*os.File) (*Checkpoint, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkTops(tops); err != nil {
		return nil, fmt.Errorf("take checkpoint: %w", errors.Join(err, linux.CloseFiles(tops...)))
	}
	if err := m.memory.PrepareFreeze(); err != nil {
		return nil, fmt.Errorf("take checkpoint: %w", errors.Join(err, linux.CloseFiles(tops...)))
	}
	over := m.quiet()
	frozen, err := m.freeze(tops)
	over()
	// What is left of the tops was not needed: those disks have not changed.
	if err := errors.Join(err, linux.CloseFiles(tops...)); err != nil {
		return nil, fmt.Errorf("take checkpoint: %w", err)
	}
	// The machine runs again; what is left concerns layers that no longer change.
	// What the machine wrote first, its children will.
	c := &Checkpoint{Shape: m.shape, Pause: frozen.pause, WorkingSet: m.workingSet, HugePages: m.layers.huge}
	if c.State, err = frozen.state.State(); err != nil {
		return nil, fmt.Errorf("take checkpoint: %w", err)
	}
	if err := m.layers.seal(); err != nil {
		return nil, fmt.Errorf("take checkpoint: %w", err)
	}
	// A stack that stays long for want of memory costs time, and nothing else.
	_ = m.layers.compact(context.Background())
	c.Memory = m.layers.sealed
	for _, d := range m.disks {
		stack := d.Stack()
		for _, l := range stack {
			if err := l.Seal(); err != nil {
				return nil, fmt.Errorf("take checkpoint: %w", err)
			}
		}
		c.Disks = append(c.Disks, stack)
		c.Compactable = c.Compactable || d.Compactable()
	}
	// The layers so far are the machine's own handles.
	if c, err = c.Clone(); err != nil {
		return nil, fmt.Errorf("take checkpoint: %w", err)
	}
	return c, nil
}

// Compact merges layers that the disks have got by checkpoints, so that hundreds of
// those do not make hundreds of layers. files has an empty file for each writable disk
// and nil for the others, as NewTops makes them. Compact takes them over. The guest
// goes on; whether it fails changes nothing but the time that requests take.
func (m *Machine) Compact(files []*os.File) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer func() { linux.CloseFiles(files...) }() // those that are left
	if err := m.checkTops(files); err != nil {
		return fmt.Errorf("compact disks: %w", err)
	}
	var errs []error
	for i, f := range files {
		if f == nil {
			continue
		}
		used, err := m.disks[i].Compact(context.Background(), f)
		if used {
			files[i] = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (m *Machine) checkTops(tops []*os.File) error {
	if m.closed {
		return os.ErrClosed
	}
	if len(tops) != len(m.disks) {
		return fmt.Errorf("%d new top layers for %d disks", len(tops), len(m.disks))
	}
	for i, d := range m.shape.Disks {
		if d.ReadOnly != (tops[i] == nil) {
			return fmt.Errorf("disk %s: a new top layer is for writable disks only", d.Name)
		}
	}
	return nil
}

// frozen is what one pause yields beside the layers.
type frozen struct {
	state *vmm.Captured
	pause time.Duration
}

// freeze is the pause: vCPUs and devices stand still, the state is read, and
// disks and memory are cut at the same moment. It sets tops that it has used to
// nil. What was cut before an error stays cut, which the guest cannot notice.
func (m *Machine) freeze(tops []*os.File) (f *frozen, err error) {
	wasPaused := m.Paused()
	begun := time.Now()
	if err := m.Machine.Pause(); err != nil {
		return nil, err
	}
	defer func() {
		if !wasPaused {
			err = errors.Join(err, m.Machine.Resume())
		}
		if err != nil {
			f = nil
			return
		}
		f.pause = time.Since(begun)
	}()
	state, err := m.Capture()
	if err != nil {
		return nil, err
	}
	for i, d := range m.disks {
		if tops[i] == nil || !d.Changed() {
			continue
		}
		cut, err := d.Freeze(tops[i])
		if err != nil {
			return nil, err
		}
		tops[i] = nil
		if err := cut.Close(); err != nil { // the disk has it in its stack
			return nil, err
		}
	}
	cut, err := m.memory.Freeze()
	if err != nil {
		return nil, err
	}
	m.layers.cut = append(m.layers.cut, cut)
	return &frozen{state: state}, nil
}
