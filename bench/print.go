package bench

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// Print writes the report for people.
func (r Report) Print(w io.Writer) error {
	t := newTable(w)
	fmt.Fprintln(t, "row\tn\tp50\tp99\tmax\tbudget\t\tverdict\t")
	for _, row := range r.Results {
		fmt.Fprintln(t, row.line())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, note := range r.Notes {
		fmt.Fprintln(w, note)
	}
	for _, b := range r.Phases {
		if err := b.print(w); err != nil {
			return err
		}
	}
	for _, c := range r.Curves {
		if err := c.print(w); err != nil {
			return err
		}
	}
	return nil
}

func newTable(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
}

func (r Result) line() string {
	if r.N == 0 {
		return fmt.Sprintf("%s\t\t\t\t\t%s\t%s\tnot measured\t", r.Name, r.limit(), r.Unit)
	}
	return fmt.Sprintf("%s\t%d\t%.2f\t%.2f\t%.2f\t%s\t%s\t%s\t", r.Name, r.N, r.P50, r.P99, r.Max, r.limit(), r.Unit, r.verdict())
}

func (r Result) limit() string {
	if r.Budget == nil {
		return ""
	}
	return fmt.Sprintf("%g", *r.Budget)
}

func (r Result) verdict() string {
	switch {
	case r.Budget == nil:
		return ""
	case r.OK:
		return "holds"
	}
	return "exceeded"
}

func (b Breakdown) print(w io.Writer) error {
	t := newTable(w)
	fmt.Fprintf(t, "\n%s\tp50\tmax\t\t\n", b.Name)
	var sum float64
	for _, p := range b.Phases {
		fmt.Fprintf(t, "%s\t%.3f\t%.3f\t%s\t\n", p.Name, p.P50, p.Max, p.Unit)
		sum += p.P50
	}
	fmt.Fprintf(t, "all\t%.3f\t\t\t\n", sum)
	return t.Flush()
}

func (c Curve) print(w io.Writer) error {
	t := newTable(w)
	fmt.Fprintf(t, "\n%s\t%s\tp50, %s\tmax\t\n", c.Name, c.X, c.Y)
	for _, p := range c.Points {
		fmt.Fprintf(t, "\t%g\t%.3f\t%.3f\t\n", p.X, p.Y.P50, p.Y.Max)
	}
	return t.Flush()
}

// Compare writes what changed between two runs, the largest changes first. Rows
// that only one of them has come last.
func Compare(w io.Writer, before, after Report) error {
	type change struct {
		name, unit string
		was, is    Result
	}
	had := map[string]Result{}
	for _, r := range before.Results {
		had[r.Name] = r
	}
	var changes, single []change
	for _, r := range after.Results {
		c := change{r.Name, r.Unit, had[r.Name], r}
		delete(had, r.Name)
		switch {
		case c.was.N > 0 && c.is.N > 0:
			changes = append(changes, c)
		case c.is.N > 0:
			single = append(single, c)
		}
	}
	for _, r := range before.Results {
		if _, left := had[r.Name]; left && r.N > 0 {
			single = append(single, change{r.Name, r.Unit, r, Result{}})
		}
	}
	ratio := func(c change) float64 { return c.is.P50 / c.was.P50 }
	slices.SortStableFunc(changes, func(a, b change) int { return cmp.Compare(distance(ratio(b)), distance(ratio(a))) })
	t := newTable(w)
	fmt.Fprintln(t, "row\tp50 before\tafter\t\tchange\tp99 before\tafter\t")
	for _, c := range changes {
		fmt.Fprintf(t, "%s\t%.3f\t%.3f\t%s\t%+.1f %%\t%.3f\t%.3f\t\n", c.name, c.was.P50, c.is.P50, c.unit, 100*(ratio(c)-1), c.was.P99, c.is.P99)
	}
	for _, c := range single {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t\t%s\t%s\t\n", c.name, figure(c.was, c.was.P50), figure(c.is, c.is.P50), c.unit, figure(c.was, c.was.P99), figure(c.is, c.is.P99))
	}
	return t.Flush()
}

// distance is how far a ratio is from 1, whichever way.
func distance(ratio float64) float64 { return max(ratio, 1/ratio) }

func figure(r Result, f float64) string {
	if r.N == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f", f)
}
