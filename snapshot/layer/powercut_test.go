package layer

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// platter is what would be left of files after a power cut: the bytes that each
// had when it was last synced. Everything later is lost.
type platter struct {
	mu    sync.Mutex
	files map[uint64][]byte // by inode
	syncs int
	fail  error
}

// sync stands for fdatasync.
func (p *platter) sync(fd int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail != nil {
		return p.fail
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	content := make([]byte, st.Size)
	for n := 0; n < len(content); {
		m, err := unix.Pread(fd, content[n:], int64(n))
		if err != nil {
			return err
		}
		if m == 0 {
			return io.ErrUnexpectedEOF // nobody makes a top shorter
		}
		n += m
	}
	p.files[st.Ino] = content
	p.syncs++
	return nil
}

// versions finds the newest version of each block that is left. Blocks say which
// they are.
func (p *platter) versions() map[uint64]uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	newest := map[uint64]uint64{}
	for _, content := range p.files {
		for at := DataOffset; at+UnitSize <= len(content); at += UnitSize {
			block, version := readVersion(content[at:])
			newest[block] = max(newest[block], version)
		}
	}
	return newest
}

func writeVersion(p []byte, block, version uint64) {
	binary.LittleEndian.PutUint64(p, block)
	binary.LittleEndian.PutUint64(p[UnitSize-8:], version)
	binary.LittleEndian.PutUint64(p[8:], version)
}

// readVersion returns version 0 for what was not written whole.
func readVersion(p []byte) (block, version uint64) {
	version = binary.LittleEndian.Uint64(p[8:])
	if version != binary.LittleEndian.Uint64(p[UnitSize-8:]) {
		version = 0
	}
	return binary.LittleEndian.Uint64(p), version
}

// C1: whenever the power is cut, every version of a block whose write had
// returned before a flush that returned is there, or a later one. Disks freeze
// meanwhile, so that flushes have former tops to cover.
func TestPowerCutC1(t *testing.T) {
	const workers, each, rounds = 4, 16, 60
	left := &platter{files: map[uint64][]byte{}}
	d := newDisk(t, DiskConfig{Size: workers * each * UnitSize})
	d.syncs.datasync = left.sync

	var mu sync.Mutex
	synced := map[uint64]uint64{}
	flushes := 0
	cut := func() {
		mu.Lock() // what was synced by now must be there now
		defer mu.Unlock()
		have := left.versions()
		for block, version := range synced {
			if have[block] < version {
				t.Errorf("after a cut block %d has version %d, the guest saw %d synced", block, have[block], version)
			}
		}
	}
	var all sync.WaitGroup
	for worker := range uint64(workers) {
		all.Go(func() {
			r := testRand(t)
			versions := map[uint64]uint64{}
			p := make([]byte, UnitSize)
			for range rounds {
				for range 1 + r.IntN(4) {
					block := worker*each + r.Uint64N(each)
					versions[block]++
					writeVersion(p, block, versions[block])
					if _, err := d.WriteAt(p, int64(block)*UnitSize); err != nil {
						t.Error(err)
					}
				}
				if r.IntN(3) == 0 {
					if err := d.Flush(); err != nil {
						t.Error(err)
					}
					mu.Lock()
					flushes++
					for block, version := range versions {
						synced[block] = version
					}
					mu.Unlock()
				}
			}
		})
	}
	all.Go(func() {
		for range rounds / 4 {
			l, err := d.Freeze(newTop(t))
			if err := errors.Join(err, l.Close()); err != nil {
				t.Error(err)
			}
			cut()
		}
	})
	all.Wait()
	cut()
	if len(synced) == 0 || left.syncs < flushes {
		t.Errorf("%d blocks synced, %d flushes of the guest were %d of the host", len(synced), flushes, left.syncs)
	}
}

// C1: a flush that the host refuses is no flush, and one that lost data is never
// forgotten.
func TestFlushFailsC1(t *testing.T) {
	left := &platter{files: map[uint64][]byte{}}
	d := newDisk(t, DiskConfig{Size: 1 << 20})
	d.syncs.datasync = left.sync
	write := func() {
		if _, err := d.WriteAt([]byte{1}, 0); err != nil {
			t.Fatal(err)
		}
	}
	write()
	left.fail = os.NewSyscallError("fdatasync", unix.ENOSPC)
	if err := d.Flush(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("flush of a full host: %v", err)
	}
	left.fail = nil
	if err := d.Flush(); err != nil || len(left.files) != 1 {
		t.Errorf("flush with space again: %v, %d files", err, len(left.files))
	}
	left.fail = unix.EIO
	for range 2 {
		if err := d.Flush(); !errors.Is(err, unix.EIO) {
			t.Errorf("flush of lost data: %v", err)
		}
		left.fail = nil // the kernel says it once
	}
}
