package bench

import (
	"context"
	"fmt"
)

// sizes are the points of the curve against RAM; the first and the last are
// compared for the budget.
var sizes = []uint64{512 << 20, 2 << 30, 8 << 30}

// dirtied are the points of the curves against dirty pages.
var dirtied = []int{10, 1000, 20000}

// bySize measures whether the size of RAM matters.
func (b *bench) bySize(ctx context.Context) error {
	curve := Curve{Name: "ram_create", Title: "create from a snapshot, until the guest agent answers", X: "guest RAM, MiB", Y: CMS}
	medians := make([]map[string]float64, len(sizes))
	for i, memory := range sizes {
		c, err := b.creates(ctx, memory, b.config.Rounds, nil)
		if err != nil {
			return err
		}
		ready := summarize("", CMS, c.ready)
		curve.add(float64(memory>>20), ready)
		medians[i] = map[string]float64{"create_cold": ready.P50, "create_first_command": summarize("", CMS, c.command).P50}
		if i == 0 || i == len(sizes)-1 {
			if err := b.running(ctx, memory, medians[i]); err != nil {
				return err
			}
		}
	}
	b.curves = append(b.curves, curve)
	b.compareSizes(medians[0], medians[len(medians)-1])
	return nil
}

// running adds the medians of what is done with running VMs of this size.
func (b *bench) running(ctx context.Context, memory uint64, medians map[string]float64) error {
	for _, row := range []struct {
		name string
		take func() ([]float64, error)
	}{
		{"fork_pause", func() ([]float64, error) {
			p, err := b.forkPauses(ctx, memory, budgetPages, b.config.Rounds)
			return p.ms, err
		}},
		{"fork16_child", func() ([]float64, error) {
			f, err := b.forks(ctx, memory, children, min(b.config.Rounds, 3), b.wait(ctx, children))
			return f.child, err
		}},
		{"reset", func() ([]float64, error) { return b.resets(ctx, memory, budgetPages, b.config.Rounds) }},
		{"step_pause", func() ([]float64, error) {
			p, err := b.stepPauses(ctx, memory, budgetPages, b.config.Rounds)
			return p.ms, err
		}},
	} {
		samples, err := row.take()
		if err != nil {
			return fmt.Errorf("%s with %d MiB: %w", row.name, memory>>20, err)
		}
		medians[row.name] = summarize("", CMS, samples).P50
	}
	return nil
}

func (b *bench) compareSizes(small, large map[string]float64) {
	var ratios []float64
	for _, l := range budget {
		if small[l.name] == 0 {
			continue
		}
		ratio := large[l.name] / small[l.name]
		ratios = append(ratios, ratio)
		b.row(l.name+"_8g_to_512m", Ratio, []float64{ratio})
	}
	b.row("ram_scaling", Ratio, ratios)
}

// byPages measures what dirty pages cost.
func (b *bench) byPages(ctx context.Context) error {
	rounds := min(b.config.Rounds, 3)
	fork := Curve{Name: "pages_fork_pause", Title: "fork: pause of the source", X: "dirty pages", Y: CMS}
	reset := Curve{Name: "pages_reset", Title: "reset in place, until the guest agent answers", X: "dirty pages", Y: CMS}
	for _, pages := range dirtied {
		p, err := b.forkPauses(ctx, standardMemory, pages, rounds)
		if err != nil {
			return err
		}
		samples, err := b.resets(ctx, standardMemory, pages, rounds)
		if err != nil {
			return err
		}
		// How many they really are is counted in a fork; before a reset the guest
		// does the same.
		x := summarize("", Pages, p.pages).P50
		fork.add(x, summarize("", CMS, p.ms))
		reset.add(x, summarize("", CMS, samples))
		b.row(fmt.Sprintf("fork_pause_%d", pages), CMS, p.ms)
		b.row(fmt.Sprintf("reset_%d", pages), CMS, samples)
	}
	b.curves = append(b.curves, fork, reset)
	return nil
}

// Curve is how a figure depends on something.
type Curve struct {
	Name   string  `json:"name"`
	Title  string  `json:"title"`
	X      string  `json:"x"`
	Y      string  `json:"y"`
	Points []Point `json:"points"`
}

// Point is one of a curve: Y has all the samples that were taken at X.
type Point struct {
	X float64 `json:"x"`
	Y Result  `json:"y"`
}

func (c *Curve) add(x float64, y Result) { c.Points = append(c.Points, Point{x, y}) }
