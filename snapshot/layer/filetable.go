package layer

import "os"

// fileTable numbers the files that a disk reads from. A file keeps its number as
// long as the disk has it: places and the base's index name it by that. The layers
// that a disk is made with have the first numbers, in their order.
type fileTable struct {
	sources []source
	former  []uint32 // the numbers of former tops, and of what was merged of them, bottom first
	free    []uint32
	top     *os.File // nil for a disk that has none
	number  uint32   // the top's
}

// source is a file that blocks are read from. raw bounds a raw image, whose
// last block may be cut short; 0 for others.
type source struct {
	file   *os.File
	raw    int64
	window *window
}

func newFileTable(layers []*Layer, top *os.File) fileTable {
	var t fileTable
	for _, l := range layers {
		s := source{file: l.file, window: new(window)}
		if l.raw != nil {
			s.raw = l.raw.size
		}
		t.sources = append(t.sources, s)
	}
	if top != nil {
		t.setTop(top)
	}
	return t
}

// add gives a file a number.
func (t *fileTable) add(f *os.File) uint32 {
	if n := len(t.free); n > 0 {
		number := t.free[n-1]
		t.free = t.free[:n-1]
		t.sources[number] = source{file: f, window: new(window)}
		return number
	}
	t.sources = append(t.sources, source{file: f, window: new(window)})
	return uint32(len(t.sources) - 1)
}

func (t *fileTable) setTop(f *os.File) { t.top, t.number = f, t.add(f) }

// frozen reports whether a file is not the top, and so does not change.
func (t *fileTable) frozen(number uint32) bool { return t.top == nil || number != t.number }

// unmap gives the windows back.
func (t *fileTable) unmap() {
	for _, s := range t.sources {
		if s.window != nil {
			s.window.unmap()
		}
	}
}

// freeze makes the top a former one.
func (t *fileTable) freeze(newTop *os.File) {
	t.former = append(t.former, t.number)
	t.setTop(newTop)
}

// merge puts one file in the place of some former tops and returns its number and
// theirs, which are free from now on.
func (t *fileTable) merge(first, count int, f *os.File) (number uint32, gone map[uint32]bool) {
	number = t.add(f)
	gone = make(map[uint32]bool, count)
	for _, n := range t.former[first : first+count] {
		gone[n] = true
		t.sources[n].window.unmap()
		t.sources[n] = source{}
		t.free = append(t.free, n)
	}
	t.former = append(append(t.former[:first:first], number), t.former[first+count:]...)
	return number, gone
}
