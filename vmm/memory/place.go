package memory

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// place maps pieces, which view already has, over what is mapped there. It
// returns those that it did not map because they would exceed the budget of
// mappings or the kernel's limit; the caller sees to it that their contents are
// in private pages. On an error the rest is complete too: none of it was touched.
func (m *Memory) place(pieces []piece) (rest []piece, err error) {
	chosen, rest := m.choose(pieces)
	done := 0
	for _, p := range chosen {
		if err = m.mapPiece(p); err != nil {
			break
		}
		m.copied.clear(p)
		done++
	}
	m.mapped = overlay(m.mapped, chosen[:done], appendApart)
	if done < len(chosen) {
		rest = append(rest, chosen[done:]...)
		byStart(rest)
	}
	return rest, ignoreTooMany(err)
}

// ignoreTooMany forgives a mapping that failed because the process has all that
// vm.max_map_count allows.
func ignoreTooMany(err error) error {
	if errors.Is(err, unix.ENOMEM) {
		return nil
	}
	return err
}

// markCopied notes that pieces are in private pages instead of mapped.
func (m *Memory) markCopied(pieces []piece) {
	for _, p := range pieces {
		m.copied = m.copied.set(p, m.pages)
	}
}

// releaseSources closes the files, from source first on, that only mapped pieces
// come from: the mappings hold them. Copied pages are compared with their file.
func (m *Memory) releaseSources(first int, copied []piece) {
	needed := make(map[int]bool)
	for _, p := range copied {
		needed[p.source] = true
	}
	for i := first; i < len(m.sources); i++ {
		if !needed[i] {
			closeAll(m.sources[i : i+1])
			m.sources[i] = nil
		}
	}
}

// file is what the pieces of a source are mapped and read from.
func (m *Memory) file(source int) *os.File {
	if f := m.sources[source]; f != nil {
		return f
	}
	return m.origin.files[source]
}

// choose splits pieces into those to map and those to copy, both ascending. Long
// ones are mapped first: they cost most to copy.
func (m *Memory) choose(pieces []piece) (chosen, rest []piece) {
	limit := m.limit(len(pieces))
	if len(overlay(m.mapped, pieces, appendApart)) <= limit {
		return pieces, nil
	}
	// A mapping in the middle of another adds two.
	room := max(0, (limit-len(m.mapped))/2)
	sorted := slices.Clone(pieces)
	slices.SortStableFunc(sorted, func(a, b piece) int { return cmp.Compare(b.count, a.count) })
	chosen, rest = sorted[:min(room, len(sorted))], sorted[min(room, len(sorted)):]
	byStart(chosen)
	byStart(rest)
	return chosen, rest
}

func byStart(pieces []piece) {
	slices.SortFunc(pieces, func(a, b piece) int { return cmp.Compare(a.start, b.start) })
}

// Mappings that a process may need for other things than memories, and from how
// many new ones on it is looked up how many the process has.
const (
	spareMappings = 4096
	manyMappings  = 256
)

// limit is how many mappings the memory may have when more are to be added:
// those of its budget, as far as the process has room for them beside all that it
// has mapped otherwise, such as the memories of other VMs.
func (m *Memory) limit(more int) int {
	if more < manyMappings {
		return m.budget
	}
	free, err := linux.FreeMappings()
	if err != nil {
		return m.budget // no /proc in sight: one VM to a process, which is locked up
	}
	return max(1, min(m.budget, len(m.mapped)+free-spareMappings))
}

// flatTarget is how many mappings flattening aims at: below the limit, so that it
// is not needed again soon.
func (m *Memory) flatTarget() int { return m.limit(manyMappings) * 3 / 4 }

func (m *Memory) mapPiece(p piece) error {
	if p.zero() {
		return m.mapping.MapZero(p.start*PageSize, p.count*PageSize)
	}
	return m.mapping.MapFile(p.start*PageSize, p.count*PageSize, m.file(p.source), p.offset)
}

// copyIn reads the contents of a piece into private pages.
func (m *Memory) copyIn(p piece) error {
	pages := m.ram[p.start*PageSize : p.end()*PageSize]
	if p.zero() {
		return guard(func() error {
			clear(pages)
			return nil
		})
	}
	return m.readSource(p, pages)
}

// readSource fills buf from where piece p begins.
func (m *Memory) readSource(p piece, buf []byte) error {
	f := m.file(p.source)
	_, err := f.ReadAt(buf, p.offset)
	if errors.Is(err, io.EOF) {
		err = ErrBackingLost // it was long enough when it was checked
	}
	if err != nil {
		return fmt.Errorf("read memory layer (%s, offset %d): %w", f.Name(), p.offset, err)
	}
	return nil
}

// bitmap is a set of pages; nil is the empty set.
type bitmap []uint64

// set adds the piece's pages; the set has room for pages pages.
func (b bitmap) set(p piece, pages uint64) bitmap {
	if b == nil {
		b = make(bitmap, (pages+63)/64)
	}
	for n := p.start; n < p.end(); n++ {
		b[n/64] |= 1 << (n % 64)
	}
	return b
}

func (b bitmap) clear(p piece) {
	if b == nil {
		return
	}
	for n := p.start; n < p.end(); n++ {
		b[n/64] &^= 1 << (n % 64)
	}
}

// ranges returns the set in ascending ranges that do not touch.
func (b bitmap) ranges() []pageRange {
	var ranges []pageRange
	for i, word := range b {
		first := uint64(i) * 64
		for word != 0 {
			start := uint64(bits.TrailingZeros64(word))
			count := uint64(bits.TrailingZeros64(^(word >> start)))
			ranges = appendRange(ranges, first+start, first+start+count)
			if start+count == 64 {
				break
			}
			word &= ^uint64(0) << (start + count)
		}
	}
	return ranges
}

func (b bitmap) count() (n uint64) {
	for _, word := range b {
		n += uint64(bits.OnesCount64(word))
	}
	return n
}

func (b bitmap) has(n uint64) bool {
	return b != nil && b[n/64]&(1<<(n%64)) != 0
}
