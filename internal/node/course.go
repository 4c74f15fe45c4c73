package node

import (
	"slices"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

// Phases of making a VM before there is a process; those of package process
// follow.
const (
	phaseImage      = "image"      // image opened
	phaseSnapshot   = "snapshot"   // snapshot opened and checked
	phaseCheckpoint = "checkpoint" // the parent asked for one, the pause included
	phaseDirectory  = "directory"  // name, directory and empty disk layers made
)

// course is where the time of making a VM goes.
type course struct {
	begun time.Duration
	machine.Timeline
}

func begin() course { return course{begun: linux.Monotonic()} }

// clone is for one of several VMs whose making begins together.
func (c course) clone() course {
	c.Timeline = slices.Clip(c.Timeline)
	return c
}

// phases closes the course with what the launch says.
func (c course) phases(s *process.Started) []machine.Phase {
	return append(c.Timeline, s.Timeline...).Phases(c.begun)
}
