package memory

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// maxReverted is how many private pages a reset keeps at most: 8 MiB.
const maxReverted = 2048

// revertLocked gives every private page the contents that view says. There are two
// ways. A page that is given back costs a fault, and a copy in the host kernel, when
// it is written again, which is many times the cost of copying its contents into it
// here; and most pages that a guest writes in one life it writes in the next: the
// kernel's own data, the guest agent's. So pages are copied and kept, within bounds,
// and one that a whole life has not written is given back.
func (m *Memory) revertLocked() error {
	private, err := m.scan(m)
	if err != nil {
		return err
	}
	r := reverter{m: m, was: m.reverted, room: maxReverted}
	for _, k := range m.reverted {
		r.room -= int(k.end - k.start)
	}
	err = guard(func() error { return r.revert(private) })
	m.reverted = r.kept
	return err
}

// reverter is one pass over the private pages, in ascending order.
type reverter struct {
	m     *Memory
	was   []pageRange // the pages kept so far that are still ahead
	kept  []pageRange // the pages kept now
	room  int         // for more of them
	from  piece       // of view: where the page at hand comes from
	spare pageRange   // pages to be given back
}

func (r *reverter) revert(private []pageRange) error {
	for _, p := range private {
		for n := p.start; n < p.end; n++ {
			if err := r.page(n); err != nil {
				return err
			}
		}
	}
	return r.giveBack(pageRange{})
}

// page gives a private page its contents.
func (r *reverter) page(n uint64) error {
	was, pinned := r.wasKept(n), r.m.copied.has(n)
	original, ok := r.original(n)
	switch {
	case !ok && pinned:
		return r.m.copyIn(r.from.from(n).until(n + 1))
	case !ok, !was && !pinned && r.room <= 0:
		return r.giveBack(pageRange{n, n + 1})
	case (was || pinned) && samePage(r.m.page(n), original):
		if pinned {
			return nil
		}
		return r.giveBack(pageRange{n, n + 1})
	}
	copy(r.m.page(n), original)
	if pinned {
		return nil
	}
	if !was {
		r.room--
	}
	r.kept = appendRange(r.kept, n, n+1)
	return nil
}

func (r *reverter) wasKept(n uint64) bool {
	for len(r.was) > 0 && r.was[0].end <= n {
		r.was = r.was[1:]
	}
	return len(r.was) > 0 && r.was[0].start <= n
}

// original returns the contents that a page is to have, if they are at hand.
func (r *reverter) original(n uint64) ([]byte, bool) {
	if n >= r.from.end() {
		r.from = r.m.view[find(r.m.view, n)]
	}
	if r.from.zero() {
		return zeroPage[:], true
	}
	file := r.m.originalOf(r.from.source)
	at := uint64(r.from.from(n).offset)
	if at+PageSize > uint64(len(file)) {
		return nil, false
	}
	return file[at : at+PageSize], true
}

// giveBack collects neighbours, so that they go in one call.
func (r *reverter) giveBack(p pageRange) error {
	if p.start == r.spare.end && p.end > 0 {
		r.spare.end = p.end
		return nil
	}
	now := r.spare
	r.spare = p
	if now.start == now.end {
		return nil
	}
	return r.m.mapping.Advise(now.start*PageSize, (now.end-now.start)*PageSize, unix.MADV_DONTNEED)
}

// originalOf returns a source's file, mapped for reading once more beside the
// memory, where nothing is private. It is empty if that cannot be had.
func (m *Memory) originalOf(source int) []byte {
	for len(m.originals) <= source {
		m.originals = append(m.originals, nil)
	}
	if m.originals[source] == nil {
		m.originals[source] = mapWhole(m.file(source))
	}
	return m.originals[source].Bytes()
}

// mapWhole maps a file as far as it has whole pages. What comes of an error is an
// empty mapping.
func mapWhole(f *os.File) *linux.Mapping {
	none := &linux.Mapping{}
	info, err := f.Stat()
	if err != nil {
		return none
	}
	size := uint64(info.Size()) &^ (PageSize - 1)
	whole, err := linux.Reserve(size)
	if err != nil {
		return none
	}
	if whole.MapFile(0, size, f, 0) != nil || whole.Advise(0, size, unix.MADV_DONTDUMP) != nil {
		_ = whole.Unmap()
		return none
	}
	return whole
}

func (m *Memory) dropOriginals() {
	for _, o := range m.originals {
		if o != nil {
			_ = o.Unmap()
		}
	}
	m.originals = nil
}
