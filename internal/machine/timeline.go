package machine

import (
	"time"

	"github.com/forkvm/forkvm/internal/linux"
)

// Phases of a machine's construction and first steps, in their order. Those of a
// reset have the same names where they do the same.
const (
	PhaseKVM        = "kvm"         // virtual machine, controllers, vCPUs
	PhaseMap        = "map"         // guest RAM over its layers, made KVM's
	PhaseDevices    = "devices"     // every device, with its state
	PhaseState      = "state"       // vCPUs and controllers, or loading the kernel
	PhaseWorkingSet = "working set" // pages that the guest will write first made ready, for a clone
	PhaseGuestAgent = "guest agent" // from the first instruction to the confirmed identity

	PhasePause = "pause" // of a reset: until vCPUs and devices stand still
	PhaseDisks = "disks" // of a reset
)

// Mark is the end of a phase, by linux.Monotonic.
type Mark struct {
	Phase string        `json:"phase"`
	At    time.Duration `json:"at_ns"`
}

// Timeline is what happened one after the other while something started. Its
// marks may come from several processes.
type Timeline []Mark

// End notes that a phase has just ended.
func (t *Timeline) End(phase string) {
	*t = append(*t, Mark{Phase: phase, At: linux.Monotonic()})
}

// Phase is a part of a start, and how long it took.
type Phase struct {
	Name string  `json:"name"`
	MS   float64 `json:"ms"`
}

// Phases divides the time since begin among the timeline's phases. Together they
// are all the time until the last mark.
func (t Timeline) Phases(begin time.Duration) []Phase {
	phases := make([]Phase, len(t))
	for i, m := range t {
		phases[i] = Phase{Name: m.Phase, MS: float64(m.At-begin) / float64(time.Millisecond)}
		begin = m.At
	}
	return phases
}
