package bench

import (
	"math"
	"slices"
	"time"
)

// Result is one row of what a run measured. Its JSON is the row's form in
// results.json.
type Result struct {
	Name string `json:"name"`
	Unit string `json:"unit"`
	// N is the number of samples; 0: not measured, and all else is empty.
	N   int     `json:"n"`
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
	// Budget is what the row may reach, nil for one without a limit.
	Budget *float64 `json:"budget"`
	// OK: measured, and within the budget if there is one.
	OK bool `json:"ok"`
}

// Units of samples.
const (
	// Counted milliseconds: a million instructions of the guest, the host's kernel
	// and the monitor together where the clock counts, and otherwise milliseconds.
	CMS   = "cms"
	MiB   = "MiB"
	Ratio = "x"
	Pages = "pages"
)

// summarize makes a result of samples. A percentile is a sample: the smallest
// that so many percent of all are not above.
func summarize(name, unit string, samples []float64) Result {
	r := Result{Name: name, Unit: unit, N: len(samples)}
	if r.N == 0 {
		return r
	}
	sorted := slices.Sorted(slices.Values(samples))
	r.P50, r.P99, r.Max = rank(sorted, 0.50), rank(sorted, 0.99), sorted[r.N-1]
	r.OK = true
	return r
}

func rank(sorted []float64, q float64) float64 {
	return sorted[max(int(math.Ceil(q*float64(len(sorted)))), 1)-1]
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
