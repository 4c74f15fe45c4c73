package machine

import (
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm/memory"
)

// mapAhead makes the pages ready that a clone writes before it can be used. Each
// would be an exit and a fault, or two where it is read first. Without it, for
// whatever reason, the guest starts slower.
func (m *Machine) mapAhead() {
	if m.workingSet == nil || m.workingSet.Wanted {
		return
	}
	set, err := m.workingSet.Read()
	if err != nil || set.RAM != m.pages() {
		return
	}
	written := make([]memory.PageRange, len(set.Written))
	for i, r := range set.Written {
		written[i] = memory.PageRange(r)
	}
	// KVM could enter them into the guest's page tables, too: that costs more than it spares
	// (docs/cost-model.md).
	_ = m.memory.Populate(written)
}

// UseJudgingSet has a checkpoint's machines make ready what clones of a snapshot in which is
// judged use, instead of what any clone does until it is ready. The checkpoint is of the
// snapshot itself, and the first of its machines is to note it (NoteUse) if nobody has, or
// of a machine that stands on the snapshot.
func (c *Checkpoint) UseJudgingSet(st *store.Store, m *snapshot.Manifest, itself bool) {
	if itself && (c.WorkingSet == nil || c.WorkingSet.Wanted) {
		return // that one is recorded first
	}
	set := st.JudgingSet(m, itself)
	if set == nil {
		return
	}
	if c.WorkingSet != nil {
		c.WorkingSet.Close() // was not written
	}
	c.WorkingSet = set
}

// NoteUse notes what the guest has used by now for a working set of all that it does, if
// nobody has before.
func (m *Machine) NoteUse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed && m.workingSet != nil && m.workingSet.Late {
		m.recordWorkingSet()
	}
}

// recordWorkingSet notes what the guest has used by now, if nobody has before.
func (m *Machine) recordWorkingSet() {
	if !m.workingSet.Wanted {
		return
	}
	own, err := m.memory.Own()
	if err != nil {
		return
	}
	if m.workingSet.Late {
		own = m.layers.fitting(own)
	}
	read, err := m.memory.ReadOnly(snapshot.MaxHugePages)
	if err != nil {
		return
	}
	// The next clone will try if this one fails.
	_ = m.workingSet.Record(snapshot.WorkingSet{RAM: m.pages(), Written: firstPages(own), Read: read})
}

func (m *Machine) pages() uint64 { return m.shape.MemoryBytes / memory.PageSize }

// firstPages cuts ranges to what a working set may have.
func firstPages(ranges []memory.PageRange) []snapshot.PageRange {
	var first []snapshot.PageRange
	left := uint64(snapshot.MaxWorkingSetPages)
	for _, r := range ranges {
		r.Count = min(r.Count, left)
		if left -= r.Count; r.Count > 0 {
			first = append(first, snapshot.PageRange(r))
		}
	}
	return first
}
