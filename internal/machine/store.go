package machine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Label is what a snapshot is called and where it comes from.
type Label struct {
	Name string
	// Task is the task that the snapshot is for, may be empty.
	Task string
	// Lineage has the IDs of the snapshots that the machine's state grew from,
	// nearest first: the one it last took, was restored from or reset to, and what
	// that one stands on.
	Lineage []string
	// Journal is the last line of the machine's journal, nil if it has none.
	Journal *snapshot.JournalHead
	// Version is the version of the program that writes it.
	Version string
}

// Store writes the checkpoint into a store as a snapshot and returns what was
// written. The snapshot is listed when everything in it is on disk, and not at
// all if anything fails.
func (c *Checkpoint) Store(ctx context.Context, st *store.Store, label Label) (*store.Info, error) {
	info, err := c.store(ctx, st, label)
	if err != nil {
		return nil, fmt.Errorf("store snapshot (%s): %w", label.Name, err)
	}
	return info, nil
}

func (c *Checkpoint) store(ctx context.Context, st *store.Store, label Label) (*store.Info, error) {
	w, err := st.Create(label.Name)
	if err != nil {
		return nil, err
	}
	defer w.Abort()
	m := &snapshot.Manifest{
		Name:          label.Name,
		ID:            snapshot.NewID(),
		Created:       time.Now().UTC(),
		Journal:       label.Journal,
		Task:          label.Task,
		Image:         c.Shape.Image,
		ForkVMVersion: label.Version,
		Guest: snapshot.Guest{
			CPUs:        c.Shape.CPUs,
			MemoryBytes: c.Shape.MemoryBytes,
			Kernel:      c.Shape.Kernel,
			CommandLine: c.Shape.CommandLine,
			GuestAgent:  c.Shape.GuestAgent,
			NetworkMTU:  c.Shape.NetworkMTU,
		},
	}
	m.Descend(label.Lineage)
	if m.Memory, err = w.AddStack(ctx, "memory", c.Memory); err != nil {
		return nil, err
	}
	for i, d := range c.Shape.Disks {
		disk := snapshot.Disk{ID: d.Name, Size: d.Size, ReadOnly: d.ReadOnly}
		if disk.Layers, err = w.AddStack(ctx, "disk-"+d.Name, c.Disks[i]); err != nil {
			return nil, err
		}
		m.Disks = append(m.Disks, disk)
	}
	if m.State, err = w.AddState(c.State); err != nil {
		return nil, err
	}
	if err := w.Commit(*m); err != nil {
		return nil, err
	}
	info, err := st.Inspect(label.Name)
	return &info, err
}

// FromStore opens a snapshot and returns what a clone of it begins from. The
// caller closes it. With verify all of the layers' data is checked, which reads
// them; otherwise a flipped bit in a page shows when the guest uses it.
func FromStore(ctx context.Context, st *store.Store, name string, verify bool) (*Checkpoint, *snapshot.Manifest, error) {
	s, err := st.Open(name)
	if err != nil {
		return nil, nil, err
	}
	if verify {
		if err := s.Verify(ctx); err != nil {
			return nil, nil, errors.Join(err, s.Close())
		}
	}
	m := s.Manifest
	// The snapshot's handles become the checkpoint's.
	c := &Checkpoint{
		State:  s.State,
		Memory: s.Memory,
		Shape:  ShapeOf(m),
	}
	for _, d := range s.Disks {
		c.Disks = append(c.Disks, d.Layers)
	}
	return c, m, nil
}

// ShapeOf is what guests of a snapshot see.
func ShapeOf(m *snapshot.Manifest) Shape {
	shape := Shape{
		CPUs:        m.Guest.CPUs,
		MemoryBytes: m.Guest.MemoryBytes,
		Kernel:      m.Guest.Kernel,
		CommandLine: m.Guest.CommandLine,
		Image:       m.Image,
		GuestAgent:  m.Guest.GuestAgent,
		NetworkMTU:  m.Guest.NetworkMTU,
	}
	for _, d := range m.Disks {
		shape.Disks = append(shape.Disks, DiskShape{Name: d.ID, Size: d.Size, ReadOnly: d.ReadOnly})
	}
	return shape
}
