package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Print writes the report for people.
func (r Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "row\tn\tp50\tp99\tmax\tbudget\t\tverdict\t")
	for _, row := range r.Results {
		fmt.Fprintln(t, row.line())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, b := range r.Phases {
		if err := b.print(w); err != nil {
			return err
		}
	}
	return nil
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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "\n%s\tp50\tmax\t\t\n", b.Name)
	var sum float64
	for _, p := range b.Phases {
		fmt.Fprintf(t, "%s\t%.3f\t%.3f\t%s\t\n", p.Name, p.P50, p.Max, p.Unit)
		sum += p.P50
	}
	fmt.Fprintf(t, "all\t%.3f\t\t\t\n", sum)
	return t.Flush()
}

// WriteJSON writes the rows as results.json has them.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r.Results)
}
