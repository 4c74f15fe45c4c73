package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/vmm"
)

// ErrNoOrigin: the machine was booted, so it has no snapshot to go back to.
var ErrNoOrigin = errors.New("machine was booted from an image and has no snapshot to go back to")

// Target says where a reset leads.
type Target struct {
	// To is what the machine goes back to, of the same shape; nil for what it
	// came from. From then on the machine comes from it.
	To *Checkpoint
	// Tops has an empty file for each writable disk's new top layer and nil for
	// the others.
	Tops []*os.File
	// Identity is what the guest gets, as a clone does.
	Identity Identity
}

// close closes what the machine has not taken over.
func (t *Target) close() error {
	err := linux.CloseFiles(t.Tops...)
	if t.To != nil {
		err = errors.Join(err, t.To.Close())
	}
	return err
}

// Reset puts the machine back to the checkpoint it came from, or to another one of
// its shape, and returns when the guest has confirmed its new identity: what a
// clone of that checkpoint would be, in the place of this machine. Connections of
// the guest are closed. A machine that was paused is paused again afterwards.
//
// Reset takes over the target's files, also when it fails. An error that is found
// before anything has changed leaves the machine as it was. After any other the
// machine has ended, with vmm.ReasonResetFailed if it did not end by itself.
//
// The timeline says how long the steps took.
func (m *Machine) Reset(ctx context.Context, t Target) (Timeline, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var timeline Timeline
	err := m.reset(ctx, &t, &timeline)
	if err := errors.Join(err, t.close()); err != nil {
		return nil, fmt.Errorf("reset machine: %w", err)
	}
	return timeline, nil
}

func (m *Machine) reset(ctx context.Context, t *Target, timeline *Timeline) error {
	if err := m.checkTarget(t); err != nil {
		return err
	}
	defer m.quiet()()
	wasPaused := m.Paused()
	if err := m.Machine.Pause(); err != nil {
		return err
	}
	timeline.End(PhasePause)
	err := m.rewind(t, timeline)
	if err == nil {
		err = m.bring(ctx, t.Identity, timeline)
	}
	if err == nil && wasPaused {
		err = m.Machine.Pause()
	}
	if err != nil {
		m.End(vmm.ReasonResetFailed, err.Error())
	}
	return err
}

func (m *Machine) checkTarget(t *Target) error {
	if err := m.checkTops(t.Tops); err != nil {
		return err
	}
	if t.To == nil {
		if m.origin == nil {
			return ErrNoOrigin
		}
		return nil
	}
	if t.To.State == nil {
		return errors.New("target has no state")
	}
	return m.shape.Compatible(t.To.Shape)
}

// Compatible says what keeps a machine of shape s from becoming one of shape o.
func (s Shape) Compatible(o Shape) error {
	switch {
	case s.CPUs != o.CPUs:
		return &ShapeError{fmt.Sprintf("it has %d vCPUs, the machine %d", o.CPUs, s.CPUs)}
	case s.MemoryBytes != o.MemoryBytes:
		return &ShapeError{fmt.Sprintf("it has %d MiB of memory, the machine %d", o.MemoryBytes>>20, s.MemoryBytes>>20)}
	case s.NetworkMTU != o.NetworkMTU:
		return &ShapeError{"its network card is not the machine's"}
	case !slices.Equal(s.Disks, o.Disks):
		return &ShapeError{"its disks are not the machine's"}
	case s.GuestAgent != o.GuestAgent, s.Kernel != o.Kernel, s.CommandLine != o.CommandLine:
		return &ShapeError{"it was booted in another way than the machine"}
	}
	return nil
}

// ShapeError says why a machine cannot be reset to a checkpoint of another one.
type ShapeError struct{ Reason string }

func (e *ShapeError) Error() string { return "target does not fit: " + e.Reason }

// rewind does what happens while the machine stands still: memory, disks, then
// vCPUs, controllers and devices, whose queues are in memory, and last the new
// generation, whose interrupt no other state may overwrite.
func (m *Machine) rewind(t *Target, timeline *Timeline) error {
	if err := m.rewindContents(t, timeline); err != nil {
		return err
	}
	return m.rewindState(t.Identity, timeline)
}

// rewindContents is the part of rewind that takes the longer the more the guest has
// done.
func (m *Machine) rewindContents(t *Target, timeline *Timeline) error {
	var err error
	if t.To != nil {
		err = m.layers.resetTo(m.memory, t.To)
	} else {
		err = m.layers.reset(m.memory)
	}
	if err != nil {
		return err
	}
	timeline.End(PhaseMap)
	for i := range m.disks {
		if err := m.rewindDisk(t, i); err != nil {
			return fmt.Errorf("disk %s: %w", m.shape.Disks[i].Name, err)
		}
	}
	timeline.End(PhaseDisks)
	if t.To != nil {
		m.origin = t.To.State
	}
	return nil
}

// rewindState is the part of rewind from which on the guest's clock counts.
func (m *Machine) rewindState(id Identity, timeline *Timeline) error {
	generation, err := id.GenerationID()
	if err != nil {
		return err
	}
	if err := m.Machine.Reset(m.origin); err != nil {
		return err
	}
	err = m.generationID.Renew(generation)
	timeline.End(PhaseState)
	return err
}

func (m *Machine) rewindDisk(t *Target, i int) error {
	if t.To == nil {
		if err := m.disks[i].Reset(t.Tops[i]); err != nil {
			return err
		}
	} else {
		if err := m.disks[i].ResetTo(t.To.Disks[i], t.Tops[i]); err != nil {
			return err
		}
		t.To.Disks[i] = nil // the disk's now
	}
	t.Tops[i] = nil
	return nil
}
