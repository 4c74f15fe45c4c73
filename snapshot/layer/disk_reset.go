package layer

import (
	"fmt"
	"os"
	"slices"

	"github.com/forkvm/forkvm/snapshot"
)

// Reset throws away what was written since the disk was made, or since ResetTo
// gave it its layers, former tops included. newTop, an empty file, becomes the
// top; it is nil for a disk without one. The time does not depend on what was
// written: the files are closed, which frees their space, in the background.
//
// Requests that run are waited for. On an error nothing has changed and newTop
// stays the caller's.
func (d *Disk) Reset(newTop *os.File) error {
	return d.reset(newTop, func() error {
		d.gone.Go(closer(d.layers[d.given:]))
		d.layers = slices.Clip(d.layers[:d.given])
		return nil
	})
}

// ResetTo is Reset to other layers, bottom first, which it takes over as NewDisk
// does. The disk keeps its size.
func (d *Disk) ResetTo(layers []*Layer, newTop *os.File) error {
	return d.reset(newTop, func() error {
		if err := (DiskConfig{Size: d.size, Layers: layers, Top: newTop, ReadOnly: d.readOnly}).check(); err != nil {
			return err
		}
		d.gone.Go(closer(d.layers))
		d.setLayers(layers)
		return nil
	})
}

// reset does what both have in common, around a change of the layers.
func (d *Disk) reset(newTop *os.File, change func() error) error {
	d.syncs.flush.Lock()
	defer d.syncs.flush.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkReset(newTop); err != nil {
		return fmt.Errorf("reset disk: %w", err)
	}
	old := d.files
	if err := change(); err != nil {
		return fmt.Errorf("reset disk: %w", err)
	}
	d.files = newFileTable(d.layers, newTop)
	d.places, d.zeros, d.top = blockMap{}, blockSet{}, top{}
	d.syncs.forget()
	d.gone.Go(func() {
		old.unmap()
		if old.top != nil {
			old.top.Close()
		}
	})
	return nil
}

func (d *Disk) checkReset(newTop *os.File) error {
	switch hasTop := d.files.top != nil; {
	case d.closed:
		return os.ErrClosed
	case hasTop != (newTop != nil):
		return fmt.Errorf("%w: a new top file is for writable disks, and only for them", snapshot.ErrInvalid)
	case newTop == nil:
		return nil
	}
	return checkTop(newTop)
}

func closer(layers []*Layer) func() {
	return func() {
		for _, l := range layers {
			l.Close()
		}
	}
}

// forget drops what is known of files that are not the disk's any more.
func (s *syncState) forget() {
	s.written.Store(false)
	s.lost = nil
	s.takeFormer()
}
