package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
)

// standardMemory is the RAM of the budget's guest.
const standardMemory = 2 << 30

// Config says what a run measures and where.
type Config struct {
	Scene SceneConfig
	// Only, if set, selects measurements by name; the others' rows stay empty.
	Only *regexp.Regexp
	// Creates is how many creates each of the rows about them rests on, Rounds
	// how many repetitions anything else.
	Creates, Rounds int
	// Log hears what is being measured.
	Log io.Writer
}

// Report is what a run measured.
type Report struct {
	Results []Result
	Phases  []Breakdown
	Curves  []Curve
	// Notes say what was not run, and why.
	Notes []string
}

// Breakdown is where the time of something goes.
type Breakdown struct {
	Name   string   `json:"name"`
	Phases []Result `json:"phases"` // in their order
}

// measurement yields some of the rows.
type measurement struct {
	name string
	take func(*bench, context.Context) error
}

var measurements = []measurement{
	{"create", (*bench).create},
	{"ready", (*bench).ready},
	{"rehearsed", (*bench).rehearsed},
	{"fork", (*bench).fork},
	{"fork_rehearsed", (*bench).forkRehearsed},
	{"reset", (*bench).reset},
	{"step", (*bench).step},
	{"reward", (*bench).reward},
	{"clone", (*bench).clone},
	{"card", (*bench).card},
	{"card_clones", (*bench).cardClones},
	{"network", (*bench).network},
	{"network_qemu", (*bench).networkQEMU},
	{"network_passt", (*bench).networkPasst},
	{"network_tap", (*bench).networkTap},
	{"network_tap_qemu", (*bench).networkTapQEMU},
	{"exec", (*bench).exec},
	{"transfer", (*bench).transfer},
	{"ssh", (*bench).ssh},
	{"size", (*bench).bySize},
	{"pages", (*bench).byPages},
	{"burst", (*bench).burst},
	{"floor", (*bench).floor},
	{"qemu", (*bench).qemu},
	{"firecracker", (*bench).firecracker},
}

// bench is a run.
type bench struct {
	config Config
	scene  *scene
	rows   map[string]Result
	extra  []string // names of rows that are no budget rows, in their order
	phases []Breakdown
	curves []Curve
	notes  []string
}

// Run measures. What cannot be measured is an error and a row that stays empty;
// the rest is measured all the same.
func Run(ctx context.Context, c Config) (Report, error) {
	s, err := newScene(c.Scene)
	if err != nil {
		return Report{}, err
	}
	b := &bench{config: c, scene: s, rows: map[string]Result{}}
	for _, m := range measurements {
		if c.Only != nil && !c.Only.MatchString(m.name) {
			continue
		}
		fmt.Fprintf(c.Log, "measuring %s\n", m.name)
		if failed := m.take(b, ctx); failed != nil {
			err = errors.Join(err, fmt.Errorf("measure %s: %w", m.name, failed))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return b.report(), errors.Join(err, s.close(ctx))
}

// row adds a row.
func (b *bench) row(name, unit string, samples []float64) {
	r := judge(summarize(name, unit, samples))
	if r.Budget == nil {
		b.extra = append(b.extra, name)
	}
	b.rows[name] = r
}

func (b *bench) note(format string, args ...any) {
	b.notes = append(b.notes, fmt.Sprintf(format, args...))
}

// report has all rows of the budget, measured or not, and then the others.
func (b *bench) report() Report {
	r := Report{Phases: b.phases, Curves: b.curves, Notes: b.notes}
	for _, l := range budget {
		row, ok := b.rows[l.name]
		if !ok {
			row = judge(Result{Name: l.name, Unit: l.unit})
		}
		r.Results = append(r.Results, row)
	}
	for _, name := range b.extra {
		r.Results = append(r.Results, b.rows[name])
	}
	return r
}
