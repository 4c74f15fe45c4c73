package memory

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
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
	rest = append(rest, chosen[done:]...)
	if errors.Is(err, unix.ENOMEM) {
		err = nil // the process has all the mappings that vm.max_map_count allows
	}
	return rest, err
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

// choose splits pieces into those to map and those to copy, both ascending in
// the first case. Long ones are mapped first: they cost most to copy.
func (m *Memory) choose(pieces []piece) (chosen, rest []piece) {
	if len(overlay(m.mapped, pieces, appendApart)) <= m.budget {
		return pieces, nil
	}
	// A mapping in the middle of another adds two.
	room := max(0, (m.budget-len(m.mapped))/2)
	byLength := slices.Clone(pieces)
	slices.SortStableFunc(byLength, func(a, b piece) int { return cmp.Compare(b.count, a.count) })
	chosen, rest = byLength[:min(room, len(byLength))], byLength[min(room, len(byLength)):]
	slices.SortFunc(chosen, func(a, b piece) int { return cmp.Compare(a.start, b.start) })
	return chosen, rest
}

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
		return m.guard(func() error {
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

// run returns the first page after start, at most end, for which the answer of
// has is another one.
func (b bitmap) run(start, end uint64) uint64 {
	if b == nil {
		return end
	}
	n := start + 1
	for n < end && b.has(n) == b.has(start) {
		n++
	}
	return n
}

func (b bitmap) has(n uint64) bool {
	return b != nil && b[n/64]&(1<<(n%64)) != 0
}
