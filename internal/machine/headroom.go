package machine

import (
	"fmt"

	"github.com/forkvm/forkvm/internal/linux"
)

// What VMs take of a control group's memory, see docs/cost-model.md.
const (
	// idleMemory is what a clone takes that has answered and idles, its process and the
	// kernel's share included. 6.5 MiB were measured.
	idleMemory = 8 << 20
	// freezeMemory is what the pause of a fork or snapshot takes at most, beside what
	// the machine has: a part of a large layer, and pages that are kept.
	freezeMemory = 24 << 20
)

const (
	// Unlimited is a headroom that is not looked at.
	Unlimited = -1
	// maxHeadroom is more than a machine can need; sums of it do not overflow.
	maxHeadroom = 1 << 50
)

// Demand is the memory that may come to be used by what is asked for.
type Demand struct {
	// VMs is how many go on to write: those that are made, and one that is forked,
	// whose pages are its children's too from then on.
	VMs int
	RAM uint64 // of each of them, bytes
	// Headroom is how many bytes there have to be for each of them. 0 means: as many as
	// an idle clone takes, and once the RAM of one, so that any one of them can write
	// all of it. Unlimited: nobody looks.
	Headroom int64
	// Freeze: a machine is paused for it, and goes on.
	Freeze bool
}

// Sure is what the demand certainly takes, and what other demands must leave.
func (d Demand) Sure() uint64 {
	each := uint64(idleMemory)
	if d.Headroom > 0 {
		each = min(uint64(d.Headroom), maxHeadroom)
	}
	sure := uint64(d.VMs) * each
	if d.Freeze {
		sure += freezeMemory
	}
	return sure
}

// Need is Sure and what has to be there beside it.
func (d Demand) Need() uint64 {
	if d.Headroom == 0 && d.VMs > 0 {
		return d.Sure() + d.RAM
	}
	return d.Sure()
}

// Check returns a *MemoryLimitError if the demand could exceed the memory limit of the
// control group that a process is in, of which others are about to use so many bytes.
func (d Demand) Check(pid int, others uint64) error {
	if d.Headroom < 0 {
		return nil
	}
	g, limited := linux.MemoryGroup(pid)
	if !limited || others+d.Need() <= g.Free() {
		return nil
	}
	return &MemoryLimitError{Group: g.Path, Limit: g.Limit, Used: g.Used + others, Need: d.Need()}
}

// MemoryLimitError: what was asked for could exceed the memory limit of the control
// group that it would run in. Nothing was done.
type MemoryLimitError struct {
	Group             string // its path below the root of the hierarchy
	Limit, Used, Need uint64 // bytes
}

func (e *MemoryLimitError) Error() string {
	return fmt.Sprintf("memory limit of control group %s could be exceeded: %d MiB of %d MiB are used, and %d MiB may be needed",
		e.Group, e.Used>>20, e.Limit>>20, (e.Need+1<<20-1)>>20)
}
