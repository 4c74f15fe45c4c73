package node

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// What clones of a snapshot read of their RAM and do not write, the kernel's code above
// all, is there once more for all of them: in a file below the run directory, if that is
// in memory, in huge pages. The second create of a snapshot makes the file, with what
// the first one's VM process has noted (store.WorkingSet) and from the layers: no VM
// process may write what other VMs map. Whatever goes wrong costs clones time and
// nothing else.

const (
	// maxHugeFiles is of how many snapshots there are huge pages, those that were made last.
	maxHugeFiles = 32
	// minFree is how many times what is to be made has to be free in the run directory's
	// file system.
	minFree = 4
)

func (n *Node) hugeDir() string { return filepath.Join(n.config.RunDir, "huge") }

// hugePages opens or makes the huge pages of a snapshot. It returns nil if there are
// none.
func (n *Node) hugePages(m *snapshot.Manifest, c *machine.Checkpoint) *machine.HugePages {
	if c.WorkingSet == nil || c.WorkingSet.Wanted {
		return nil
	}
	if h := n.openHuge(m, len(c.Memory)); h != nil {
		return h
	}
	if !linux.InMemory(n.config.RunDir) {
		return nil
	}
	set, err := c.WorkingSet.Read()
	if err != nil || len(set.Read) == 0 || set.RAM*snapshot.UnitSize != m.Guest.MemoryBytes {
		return nil
	}
	if n.makeHuge(&snapshot.HugePages{Snapshot: m.ID, RAM: set.RAM, Pages: set.Read}, c.Memory) != nil {
		return nil
	}
	return n.openHuge(m, len(c.Memory))
}

func (n *Node) openHuge(m *snapshot.Manifest, above int) *machine.HugePages {
	f, err := os.OpenFile(filepath.Join(n.hugeDir(), m.ID), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil
	}
	h, err := machine.OpenHugePages(f, above)
	if err != nil {
		f.Close()
		return nil
	}
	if !h.Of(m) {
		h.Close()
		return nil
	}
	return h
}

// errBusy: somebody else is making huge pages.
var errBusy = errors.New("huge pages are being made")

// makeHuge makes the file of huge pages with the contents of a stack of layers. Who
// comes meanwhile goes without.
func (n *Node) makeHuge(h *snapshot.HugePages, stack []*layer.Layer) error {
	if err := os.MkdirAll(n.hugeDir(), 0o700); err != nil {
		return err
	}
	lock, err := os.Open(n.hugeDir())
	if err != nil {
		return err
	}
	defer lock.Close()
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return errBusy
	}
	if err := n.makeRoomForHuge(h.Size()); err != nil {
		return err
	}
	f, err := linux.UnnamedFile(n.hugeDir(), 0o400)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := fillHuge(f, h, stack); err != nil {
		return err
	}
	// There is no sound file of that name.
	if err := n.dropHuge(h.Snapshot); err != nil {
		return err
	}
	return linux.LinkFile(f, filepath.Join(n.hugeDir(), h.Snapshot))
}

// fillHuge writes the file. What does not become a huge page is left out; so a host that
// has none does not try again.
func fillHuge(f *os.File, h *snapshot.HugePages, stack []*layer.Layer) error {
	buf := make([]byte, snapshot.HugePageSize)
	var made []uint64
	for _, page := range h.Pages {
		at := snapshot.HugePageOffset(len(made))
		if err := layer.ReadUnits(stack, page, buf); err != nil {
			return err
		}
		if _, err := f.WriteAt(buf, at); err != nil {
			return err
		}
		if linux.Collapse(f, at, snapshot.HugePageSize) == nil {
			made = append(made, page)
		}
	}
	h.Pages = made
	if err := f.Truncate(h.Size()); err != nil {
		return err
	}
	header, err := h.Encode()
	if err != nil {
		return err
	}
	_, err = f.WriteAt(header, 0)
	return err
}

// makeRoomForHuge removes the oldest files if there are too many, and asks whether there
// is room for one of this size.
func (n *Node) makeRoomForHuge(size int64) error {
	entries, err := os.ReadDir(n.hugeDir())
	if err != nil {
		return err
	}
	var infos []os.FileInfo
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			infos = append(infos, info)
		}
	}
	slices.SortFunc(infos, func(a, b os.FileInfo) int { return cmp.Compare(a.ModTime().UnixNano(), b.ModTime().UnixNano()) })
	for _, info := range infos[:max(0, len(infos)-maxHugeFiles+1)] {
		if err := os.Remove(filepath.Join(n.hugeDir(), info.Name())); err != nil {
			return err
		}
	}
	free, err := linux.FreeBytes(n.hugeDir())
	if err == nil && free < minFree*uint64(size) {
		err = unix.ENOSPC
	}
	return err
}

// dropHuge removes the huge pages of a snapshot, if there are any.
func (n *Node) dropHuge(id string) error {
	if err := os.Remove(filepath.Join(n.hugeDir(), id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
