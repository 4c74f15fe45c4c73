package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// Rehearse lives a life of a machine that was made of a checkpoint and has not begun,
// until its guest has confirmed the identity and run a first command, and puts it back to
// its beginning. What the guest writes to its disks meanwhile goes into the tops that the
// machine was made with; tops are those that lie empty behind it. The machine then is what
// it was, and waits for Perform: paused, its pages warm, its connections closed, its network
// gone.
//
// Rehearse takes over the files, also when it fails. On error the machine is good for
// nothing but Close.
func (m *Machine) Rehearse(ctx context.Context, id Identity, tops []*os.File) error {
	err := m.rehearse(ctx, id, tops)
	if err := errors.Join(err, linux.CloseFiles(tops...)); err != nil {
		return fmt.Errorf("rehearse machine: %w", err)
	}
	return nil
}

func (m *Machine) rehearse(ctx context.Context, id Identity, tops []*os.File) error {
	if !m.shape.GuestAgent {
		return errors.New("it has no guest agent to say when its guest is ready")
	}
	if err := m.Bring(ctx, id); err != nil {
		return err
	}
	m.recording.Wait() // of the pages that a clone uses until it is ready
	// A clone is there to run commands. A guest that does not know this one rehearses less.
	_, err := m.Agent().Exec(ctx, client.Command{Args: []string{"true"}})
	if ctx.Err() != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	t := Target{Tops: tops}
	if err := m.checkTarget(&t); err != nil {
		return err
	}
	if err := m.Machine.Pause(); err != nil {
		return err
	}
	if err := m.disconnect(); err != nil {
		return err
	}
	var unnoted Timeline
	if err := m.rewindContents(&t, &unnoted); err != nil {
		return err
	}
	// Once more when it performs: its clock and timers count from then on.
	if err := m.Machine.Reset(m.origin); err != nil {
		return err
	}
	m.generation.Store(nil)
	return nil
}

// Role is what a machine becomes that has rehearsed.
type Role struct {
	// Target says where it begins. Without a checkpoint that is what it has rehearsed,
	// and there are no tops.
	Target
	// WorkingSet says what more to make ready than was rehearsed; may be nil.
	WorkingSet *store.WorkingSet
	// Console, MAC and Network are Config's.
	Console io.Writer
	MAC     MAC
	Network Network
}

// Close closes what the machine has not taken over.
func (r *Role) Close() error {
	err := r.close()
	if r.WorkingSet != nil {
		err = errors.Join(err, r.WorkingSet.Close())
	}
	if r.Network != nil {
		err = errors.Join(err, r.Network.Close())
	}
	return err
}

// Perform begins the life that Rehearse has prepared, and returns when the guest has
// confirmed its identity: what a clone would be, in the place of this machine. Perform
// takes over the role's files, also when it fails. On error the machine is good for
// nothing but Close. The timeline is of this beginning from then on.
func (m *Machine) Perform(ctx context.Context, r Role) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.perform(ctx, &r)
	if err := errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("perform machine: %w", err)
	}
	return nil
}

func (m *Machine) perform(ctx context.Context, r *Role) error {
	if m.origin == nil {
		return ErrNoOrigin
	}
	if !m.Paused() || m.generation.Load() != nil {
		return errors.New("its life has begun")
	}
	defer m.quiet()()
	m.timeline = nil
	m.serial.Begin(r.Console)
	err := m.connect(r)
	if err == nil {
		err = m.rewindTo(r)
	}
	if err == nil {
		m.makeReady(r)
		err = m.bring(ctx, r.Identity, &m.timeline)
	}
	if err != nil {
		m.End(vmm.ReasonResetFailed, err.Error())
	}
	return err
}

// rewindTo puts the machine where the role begins.
func (m *Machine) rewindTo(r *Role) error {
	if r.To == nil {
		return m.rewindState(r.Identity, &m.timeline)
	}
	if err := m.checkTarget(&r.Target); err != nil {
		return err
	}
	m.memory.Unused() // since the rehearsal
	return m.rewind(&r.Target, &m.timeline)
}

// makeReady makes the pages ready that the role will use and the rehearsal may not have.
func (m *Machine) makeReady(r *Role) {
	if r.WorkingSet == nil && r.To != nil {
		r.WorkingSet, r.To.WorkingSet = r.To.WorkingSet, nil
	}
	if r.WorkingSet == nil {
		return
	}
	if m.workingSet != nil {
		m.workingSet.Close() // has been read, or written
	}
	m.workingSet, r.WorkingSet = r.WorkingSet, nil
	m.mapAhead()
	m.timeline.End(PhaseWorkingSet)
}
