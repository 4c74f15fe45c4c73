package memory

import (
	"cmp"
	"fmt"
	"os"
	"slices"

	"github.com/forkvm/forkvm/internal/linux"
)

// A window is a stretch of RAM that can be flattened: its pages, wherever they
// come from, are copied into a memory file next to each other and take one mapping
// from then on. It holds what one mapping is worth, and not so much that pages
// that need not be copied go along in numbers.
const windowPages = 256

// crowded chooses windows to flatten, those with the most mappings first, so that
// mapping pieces over what is mapped takes no more than limit mappings. It
// returns nil if that cannot be done: the limit is too small, or the mappings lie
// too far from each other.
func (m *Memory) crowded(pieces []piece, limit int) []pageRange {
	counts := make([]int, (m.pages+windowPages-1)/windowPages)
	total := 0
	for _, p := range overlay(m.mapped, pieces, appendApart) {
		total++
		for w := p.start / windowPages; w <= (p.end()-1)/windowPages; w++ {
			counts[w]++
		}
	}
	var windows []int
	for w, n := range counts {
		if n > 8 { // with fewer, the pages cost more than the mappings
			windows = append(windows, w)
		}
	}
	slices.SortStableFunc(windows, func(a, b int) int { return cmp.Compare(counts[b], counts[a]) })
	for i, w := range windows {
		// What reaches over the window's ends stays on the other side.
		if total -= counts[w] - 3; total <= limit {
			return m.windowRanges(windows[:i+1])
		}
	}
	return nil
}

func (m *Memory) windowRanges(windows []int) []pageRange {
	slices.Sort(windows)
	ranges := make([]pageRange, len(windows))
	for i, w := range windows {
		start := uint64(w) * windowPages
		ranges[i] = pageRange{start, min(start+windowPages, m.pages)}
	}
	return ranges
}

// flatten copies the windows, which read fills, into a memory file and maps that.
// What was private in them is gone afterwards, and has to be what read returns. The
// file is mapped under the number of a source that says what is in it.
func (m *Memory) flatten(windows []pageRange, number int, read func(r pageRange, buf []byte) error) error {
	if len(windows) == 0 {
		return nil
	}
	f, err := linux.MemoryFile("memory-flat")
	if err != nil {
		return err
	}
	defer f.Close() // the mappings hold it
	if err := f.Truncate(int64(countPages(windows) * PageSize)); err != nil {
		return fmt.Errorf("size flat memory: %w", err)
	}
	longest := slices.MaxFunc(windows, func(a, b pageRange) int { return cmp.Compare(a.end-a.start, b.end-b.start) })
	buf := make([]byte, (longest.end-longest.start)*PageSize)
	offset := int64(0)
	var flat []piece
	for _, r := range windows {
		part := buf[:(r.end-r.start)*PageSize]
		if err := read(r, part); err != nil {
			return err
		}
		if err := writeRuns(f, part, offset); err != nil {
			return err
		}
		flat = append(flat, piece{start: r.start, count: r.end - r.start, source: number, offset: offset})
		offset += int64(len(part))
	}
	if err := linux.AddSeals(f, linux.SealShrink|linux.SealGrow|linux.SealWrite|linux.SealSeal); err != nil {
		return err
	}
	for _, p := range flat {
		if err := m.mapping.MapFile(p.start*PageSize, p.count*PageSize, f, p.offset); err != nil {
			return err
		}
		if err := m.advisePiece(p); err != nil {
			return err
		}
		m.copied.clear(p)
		m.mapped = overlay(m.mapped, []piece{p}, appendApart)
	}
	return nil
}

// writeRuns writes what is not zeros; the rest are holes.
func writeRuns(f *os.File, data []byte, offset int64) error {
	for at := 0; at < len(data); {
		end := at
		for end < len(data) && !isZero(data[end:end+PageSize]) {
			end += PageSize
		}
		if end > at {
			if _, err := f.WriteAt(data[at:end], offset+int64(at)); err != nil {
				return fmt.Errorf("write flat memory: %w", err)
			}
		}
		at = end + PageSize
	}
	return nil
}

// readView fills buf with the contents that view says. The files of all sources
// in the range are needed.
func (m *Memory) readView(r pageRange, buf []byte) error {
	for _, p := range within(m.view, r) {
		part := buf[(p.start-r.start)*PageSize : (p.end()-r.start)*PageSize]
		if p.zero() {
			clear(part)
		} else if err := m.readSource(p, part); err != nil {
			return err
		}
	}
	return nil
}

// readRAM fills buf with what the memory contains now.
func (m *Memory) readRAM(r pageRange, buf []byte) error {
	return guard(func() error {
		copy(buf, m.ram[r.start*PageSize:r.end*PageSize])
		return nil
	})
}

// outside returns the parts of pieces that lie in none of the ranges. Both ascend.
func outside(pieces []piece, ranges []pageRange) []piece {
	var out []piece
	for _, p := range pieces {
		for len(ranges) > 0 && ranges[0].end <= p.start {
			ranges = ranges[1:]
		}
		for _, r := range ranges {
			if r.start >= p.end() {
				break
			}
			if r.start > p.start {
				out = append(out, p.until(r.start))
			}
			p = p.from(min(r.end, p.end()))
		}
		if p.count > 0 {
			out = append(out, p)
		}
	}
	return out
}
