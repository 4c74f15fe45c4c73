package layer

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// Freeze makes the top an immutable layer and newTop, an empty file, the new
// top, in constant time: no data is read, copied or synced. The disk's content
// does not change. Requests that run are waited for; writes that began later
// go to the new top.
//
// The layer returned is the caller's, a handle of its own. Its index is made
// when first asked for, and Seal writes it to the file. On an error nothing
// has changed and newTop stays the caller's.
func (d *Disk) Freeze(newTop *os.File) (*Layer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkFreeze(newTop); err != nil {
		return nil, fmt.Errorf("freeze disk: %w", err)
	}
	old := d.files.top
	ours, err := dupFile(old)
	if err != nil {
		return nil, fmt.Errorf("freeze disk: %w", err)
	}
	c := &core{
		id: snapshot.NewID(), kind: KindDisk, units: d.blocks,
		frozen: &frozenTop{owner: d.top.owner, zeros: d.top.zeros},
	}
	d.layers = append(d.layers, &Layer{core: c, file: old})
	d.files.freeze(newTop)
	d.top = top{}
	if d.syncs.written.Swap(false) {
		d.syncs.add(old)
	}
	return &Layer{core: c, file: ours}, nil
}

// Changed reports whether anything was written or discarded since the last
// freeze. If not, the layers are the whole disk, and another freeze would only
// make the stack deeper.
func (d *Disk) Changed() bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return len(d.top.owner) > 0 || !d.top.zeros.empty()
}

func (d *Disk) checkFreeze(newTop *os.File) error {
	switch {
	case d.closed:
		return os.ErrClosed
	case d.readOnly:
		return ErrReadOnly
	case len(d.layers) >= snapshot.MaxLayers:
		return fmt.Errorf("%w: %d layers", snapshot.ErrTooLarge, len(d.layers))
	case newTop == nil:
		return fmt.Errorf("%w: no new top file", snapshot.ErrInvalid)
	}
	return checkTop(newTop)
}

// syncState is which files hold writes that no Flush has covered.
type syncState struct {
	written atomic.Bool // the top, since it became the top or was synced

	// datasync is fdatasync, unless a test stands for what keeps the data.
	datasync func(fd int) error

	flush sync.Mutex // one Flush at a time
	lost  error      // guarded by flush: a sync failed with data gone, said ever after

	mu     sync.Mutex
	former []*os.File // guarded by mu: former tops, and what was merged of them
}

func (s *syncState) add(files ...*os.File) {
	s.mu.Lock()
	s.former = append(s.former, files...)
	s.mu.Unlock()
}

func (s *syncState) takeFormer() []*os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	former := s.former
	s.former = nil
	return former
}

// Flush returns when every write that returned before it is on stable
// storage: one fdatasync of the top, and of former tops that were frozen with
// writes not yet flushed. It does not wait for writes that began later, and
// neither they nor a Freeze wait for it.
//
// When the host reports that it lost data (EIO), this Flush and all later ones
// fail: the kernel reports it once, and the guest must not take the next
// success for its own.
func (d *Disk) Flush() error {
	d.syncs.flush.Lock()
	defer d.syncs.flush.Unlock()
	if err := d.flush(); err != nil {
		return fmt.Errorf("flush disk: %w", err)
	}
	return nil
}

func (d *Disk) flush() error {
	files, err := d.toSync()
	if err != nil || len(files) == 0 {
		return err
	}
	for i, f := range files {
		if d.syncs.lost != nil {
			return d.syncs.lost
		}
		if err := d.syncs.sync(f); err != nil {
			d.syncs.add(files[i:]...)
			return err
		}
	}
	return nil
}

// toSync takes the list of files that hold everything written so far.
func (d *Disk) toSync() ([]*os.File, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return nil, os.ErrClosed
	}
	if d.readOnly {
		return nil, nil
	}
	// Cleared before the sync: a write that comes in between sets it again.
	d.syncs.written.Store(false)
	return append(d.syncs.takeFormer(), d.files.top), nil
}

func (s *syncState) sync(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var syncErr error
	err = raw.Control(func(fd uintptr) {
		for {
			if syncErr = s.datasync(int(fd)); !errors.Is(syncErr, unix.EINTR) {
				return
			}
		}
	})
	if err != nil {
		return err
	}
	if errors.Is(syncErr, unix.EIO) {
		s.lost = syncErr
	}
	return os.NewSyscallError("fdatasync", syncErr)
}
