package bench

import (
	"time"

	"github.com/forkvm/forkvm/internal/machine"
)

// course collects how long each phase of the same thing took, time after time.
type course struct {
	order   []string
	samples map[string][]float64
}

// add adds the phases that a VM's record has. What they do not cover of the time
// that the caller waited becomes a phase of its own.
func (c *course) add(phases []machine.Phase, waited time.Duration) {
	rest := ms(waited)
	for _, p := range phases {
		c.step(p.Name, p.MS)
		rest -= p.MS
	}
	c.step("record", rest)
}

func (c *course) step(name string, took float64) {
	if c.samples == nil {
		c.samples = map[string][]float64{}
	}
	if c.samples[name] == nil {
		c.order = append(c.order, name)
	}
	c.samples[name] = append(c.samples[name], took)
}

func (c *course) breakdown(name string) Breakdown {
	b := Breakdown{Name: name}
	for _, phase := range c.order {
		b.Phases = append(b.Phases, summarize(phase, CMS, c.samples[phase]))
	}
	return b
}
