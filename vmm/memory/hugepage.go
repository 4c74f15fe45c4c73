package memory

import (
	"cmp"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// HugePage is how many pages a huge page has. The hypervisor maps one for the guest
// with a single fault where a file's huge page is mapped at an address and as RAM
// that are multiples of its size. That is worth it where the guest reads and does not
// write: the first write takes the huge page apart, for this memory.
const HugePage = linux.HugePageSize / PageSize

// aroundFault is how many pages the kernel maps at a fault, in the file's page cache
// and around the page that was touched (fault_around_bytes).
const aroundFault = 16

// minTouches is how many faults a huge page has to spare.
const minTouches = 3

// ReadOnly returns the first pages of at most that many huge pages' worth of RAM of
// which pages were read and none was written, ascending: those with the most faults.
// Copies that the memory made for itself count as written. It needs Linux 6.7; before,
// there are none. Anybody may use guest memory meanwhile.
func (m *Memory) ReadOnly(most int) ([]uint64, error) {
	m.lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return nil, m.errClosed("scan")
	}
	own, err := m.scan(m)
	if err != nil {
		return nil, err
	}
	touches := make(map[uint64]uint64) // by huge page
	base := uint64(m.base)
	err = m.pagemap.ScanFile(base, base+m.size, func(r linux.AddressRange) {
		for start := (r.Start - base) / PageSize; start < (r.End-base)/PageSize; start += aroundFault {
			touches[start/HugePage]++
		}
	})
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, r := range own {
		for n := r.start / HugePage; n*HugePage < r.end; n++ {
			delete(touches, n)
		}
	}
	var chosen []uint64
	for n, faults := range touches {
		if faults >= minTouches && (n+1)*HugePage <= m.pages {
			chosen = append(chosen, n)
		}
	}
	slices.SortFunc(chosen, func(a, b uint64) int { return cmp.Or(cmp.Compare(touches[b], touches[a]), cmp.Compare(a, b)) })
	chosen = chosen[:min(most, len(chosen))]
	slices.Sort(chosen)
	for i := range chosen {
		chosen[i] *= HugePage
	}
	return chosen, nil
}
