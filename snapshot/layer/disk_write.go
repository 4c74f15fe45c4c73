package layer

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// WriteAt writes p at off. Blocks that the top does not have yet are added to
// it; a block written in part is completed from the layers below. After an
// error the first n bytes are written, and the others are as before or, within
// blocks that the top had, written too. ENOSPC and the like can be told with
// errors.Is; the disk goes on, and works again when there is space.
func (d *Disk) WriteAt(p []byte, off int64) (int, error) {
	n, err := d.writeAt(p, off)
	if err != nil {
		return n, fmt.Errorf("write disk: %w", err)
	}
	return n, nil
}

func (d *Disk) writeAt(p []byte, off int64) (int, error) {
	if n, done, err := d.overwrite(p, off); done {
		return n, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	// The disk may have been frozen or closed in between.
	if err := d.checkWrite(off, int64(len(p))); err != nil {
		return 0, err
	}
	return d.writeLocked(p, off)
}

func (d *Disk) checkWrite(off, n int64) error {
	if err := d.check(off, n); err != nil {
		return err
	}
	if d.readOnly {
		return ErrReadOnly
	}
	return nil
}

// overwrite handles writes to blocks that the top already has, under the
// shared lock. done is false, and nothing was written, if there are others.
func (d *Disk) overwrite(p []byte, off int64) (n int, done bool, err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if err := d.checkWrite(off, int64(len(p))); err != nil {
		return 0, true, err
	}
	if !d.allInTop(off, len(p)) {
		return 0, false, nil
	}
	for n < len(p) {
		block, in, want := blockSpan(off, len(p)-n)
		at, _ := d.places.get(block)
		count := d.places.together(block, want, at)
		piece := p[n : n+int(min(int64(count)*UnitSize-in, int64(len(p)-n)))]
		wrote, err := d.writeTop(piece, at.offset()+in)
		n += wrote
		if err != nil {
			return n, true, err
		}
		off += int64(wrote)
	}
	return n, true, nil
}

// blockSpan says which block a range begins in, how far inside, and how many
// blocks it touches.
func blockSpan(off int64, n int) (block uint64, in int64, count uint64) {
	in = off % UnitSize
	return uint64(off) / UnitSize, in, (uint64(in) + uint64(n) + UnitSize - 1) / UnitSize
}

func (d *Disk) allInTop(off int64, n int) bool {
	block, _, count := blockSpan(off, n)
	for end := block + count; block < end; {
		at, ok := d.places.get(block)
		if !ok || at.file() != d.files.number {
			return false
		}
		block += d.places.together(block, end-block, at)
	}
	return true
}

// writeTop writes to the top's file and notes that it wants a sync.
func (d *Disk) writeTop(p []byte, off int64) (int, error) {
	n, err := writeFull(d.files.top, p, off)
	d.syncs.written.Store(true)
	return n, err
}

// writeFull is WriteAt that says how far it got: os.File's returns 0 when the
// host ran out of space half-way. The caller keeps f open.
func writeFull(f *os.File, p []byte, off int64) (done int, err error) {
	for done < len(p) {
		n, err := unix.Pwrite(int(f.Fd()), p[done:], off+int64(done))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return done, os.NewSyscallError("pwrite", err)
		case n == 0:
			return done, io.ErrShortWrite
		default:
			done += n
		}
	}
	return done, nil
}

// writeLocked writes block runs, each in the cheapest way.
func (d *Disk) writeLocked(p []byte, off int64) (done int, err error) {
	for done < len(p) {
		n, err := d.writeRun(p[done:], off)
		done += n
		off += int64(n)
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// writeRun writes the first run of p: blocks that lie together in the top, one
// partial block, or whole new blocks.
func (d *Disk) writeRun(p []byte, off int64) (int, error) {
	block, in, want := blockSpan(off, len(p))
	if at, ok := d.places.get(block); ok && at.file() == d.files.number {
		count := d.places.together(block, want, at)
		n := min(int64(count)*UnitSize-in, int64(len(p)))
		return d.writeTop(p[:n], at.offset()+in)
	}
	if in != 0 || len(p) < UnitSize {
		return d.writePartial(p[:min(UnitSize-in, int64(len(p)))], block, in)
	}
	fresh := d.notInTop(block, uint64(len(p))/UnitSize)
	return d.writeFresh(p[:fresh*UnitSize], block)
}

// notInTop returns for how many blocks, of the limit, the top has nothing.
func (d *Disk) notInTop(block, limit uint64) uint64 {
	for n := uint64(0); n < limit; {
		at, ok := d.places.get(block + n)
		switch {
		case !ok:
			n += d.places.absent(block+n, limit-n)
		case at.file() == d.files.number:
			return n
		default:
			n += d.places.together(block+n, limit-n, at)
		}
	}
	return limit
}

// writePartial puts p into a block that the top does not have.
func (d *Disk) writePartial(p []byte, block uint64, in int64) (int, error) {
	whole := d.whole[:]
	if _, err := d.readLocked(whole, int64(block)*UnitSize); err != nil {
		return 0, err
	}
	copy(whole[in:], p)
	if _, err := d.writeFresh(whole, block); err != nil {
		return 0, err
	}
	return len(p), nil
}

// writeFresh writes whole blocks into new slots: the data first, then the map,
// so that a failed write leaves the blocks as they were.
func (d *Disk) writeFresh(p []byte, block uint64) (int, error) {
	run := d.top.allocate(uint64(len(p)) / UnitSize)
	at := newPlace(d.files.number, 1+run.start)
	n, err := d.writeTop(p[:run.count*UnitSize], at.offset())
	if err != nil {
		d.discardSlots(slotRun{run.start + uint64(n)/UnitSize, run.count - uint64(n)/UnitSize})
		run.count = uint64(n) / UnitSize
	}
	if run.count > 0 {
		d.top.assign(run, block)
		d.places.set(block, run.count, at)
		d.zeros.remove(block, block+run.count)
		d.top.zeros.remove(block, block+run.count)
	}
	return int(run.count) * UnitSize, err
}

func (d *Disk) discardSlots(run slotRun) {
	if run.count > 0 {
		punch(d.files.top, run)
		d.top.release(run)
	}
}

// Discard makes a range's whole blocks read as zeros and gives their space in
// the top back. Blocks touched in part are left alone: a device may ignore a
// discard, not widen it.
func (d *Disk) Discard(off, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.checkWrite(off, n); err != nil {
		return fmt.Errorf("discard disk: %w", err)
	}
	from, to := d.wholeBlocks(off, n)
	d.zeroBlocks(from, to)
	return nil
}

// WriteZeroes makes a range read as zeros. Only blocks touched in part can
// need space; the others give theirs back.
func (d *Disk) WriteZeroes(off, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.writeZeroesLocked(off, n); err != nil {
		return fmt.Errorf("write zeroes to disk: %w", err)
	}
	return nil
}

func (d *Disk) writeZeroesLocked(off, n int64) error {
	if err := d.checkWrite(off, n); err != nil {
		return err
	}
	from, to := d.wholeBlocks(off, n)
	if from >= to {
		return d.zeroBytes(off, off+n)
	}
	if err := d.zeroBytes(off, int64(from)*UnitSize); err != nil {
		return err
	}
	d.zeroBlocks(from, to)
	return d.zeroBytes(min(int64(to)*UnitSize, off+n), off+n)
}

// wholeBlocks returns the blocks that a range covers completely. The last
// block of the disk counts as covered where the disk ends.
func (d *Disk) wholeBlocks(off, n int64) (from, to uint64) {
	from = uint64(off+UnitSize-1) / UnitSize
	if off+n == d.size {
		return from, d.blocks
	}
	return from, uint64(off+n) / UnitSize
}

// zeroBytes writes zeros to parts of at most two blocks, unless they are
// zeros already.
func (d *Disk) zeroBytes(from, to int64) error {
	for from < to {
		end := min(to, (from/UnitSize+1)*UnitSize)
		if d.lookup(uint64(from)/UnitSize, 1).offset != ZeroExtent {
			if _, err := d.writeLocked(make([]byte, end-from), from); err != nil {
				return err
			}
		}
		from = end
	}
	return nil
}

// zeroBlocks makes [from, to) zero: slots are freed, and where a layer below
// may hold data the top remembers that it hides it. It cannot fail.
func (d *Disk) zeroBlocks(from, to uint64) {
	if from >= to {
		return
	}
	hide := func(from, to uint64) {
		d.zeros.add(from, to)
		d.top.zeros.add(from, to)
	}
	var freed slotRun
	d.places.take(from, to, func(block uint64, at place) {
		hide(block, block+1)
		if at.file() != d.files.number {
			return
		}
		slot := at.unit() - 1
		if freed.start+freed.count != slot || freed.count == 0 {
			d.discardSlots(freed)
			freed = slotRun{start: slot}
		}
		freed.count++
	})
	d.discardSlots(freed)
	base := d.base()
	for i := base.find(from); i < len(base) && base[i].start < to; i++ {
		hide(max(from, base[i].start), min(to, base[i].end()))
	}
}
