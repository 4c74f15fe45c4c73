package memory

// plan is what Freeze does with each changed page.
type plan struct {
	extents []Extent    // of the new layer
	bytes   int64       // size of its file
	private []pageRange // the pages in extents that are private
	dropped []pageRange // private pages that are in none: zeros over zeros
}

func (m *Memory) planLocked() (plan, error) {
	changed, err := m.changedLocked()
	if err != nil {
		return plan{}, err
	}
	gone := without(m.discarded.ranges(), changed)
	p := plan{bytes: DataStart}
	err = guard(func() error {
		for _, r := range changed {
			for len(gone) > 0 && gone[0].start < r.start {
				p.addGone(gone[0])
				gone = gone[1:]
			}
			for n := r.start; n < r.end; n++ {
				m.planPage(&p, n)
			}
		}
		return nil
	})
	for _, r := range gone {
		p.addGone(r)
	}
	return p, err
}

// planPage adds a private page.
func (m *Memory) planPage(p *plan, n uint64) {
	switch {
	case !isZero(m.page(n)):
		p.extend(Extent{Start: n, Count: 1, Offset: p.bytes})
		p.bytes += PageSize
	case m.view[find(m.view, n)].zero() && !m.discarded.has(n):
		p.dropped = appendRange(p.dropped, n, n+1)
		return
	default:
		p.extend(Extent{Start: n, Count: 1, Offset: ZeroExtent})
	}
	p.private = appendRange(p.private, n, n+1)
}

// addGone adds pages that are zeros without being private.
func (p *plan) addGone(r pageRange) {
	p.extend(Extent{Start: r.start, Count: r.end - r.start, Offset: ZeroExtent})
}

func (p *plan) extend(e Extent) {
	if n := len(p.extents); n > 0 {
		last := &p.extents[n-1]
		if last.Start+last.Count == e.Start && (last.Offset == ZeroExtent) == (e.Offset == ZeroExtent) {
			last.Count += e.Count // data is packed, so the file goes on as the pages do
			return
		}
	}
	p.extents = append(p.extents, e)
}
