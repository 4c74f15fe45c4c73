package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
)

// Conditions of the budget, and sizes between which RAM must not matter.
const (
	standardMemory = 2 << 30
	smallMemory    = 512 << 20
	largeMemory    = 8 << 30
)

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
	{"fork", (*bench).fork},
	{"clone", (*bench).clone},
}

// bench is a run.
type bench struct {
	config Config
	scene  *scene
	rows   map[string]Result
	extra  []string // names of rows that are no budget rows, in their order
	phases []Breakdown
}

// Run measures. An error ends it; the report then has what was measured before.
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
		if err = m.take(b, ctx); err != nil {
			err = fmt.Errorf("measure %s: %w", m.name, err)
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

// report has all rows of the budget, measured or not, and then the others.
func (b *bench) report() Report {
	r := Report{Phases: b.phases}
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
