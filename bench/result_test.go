package bench

import (
	"strings"
	"testing"
)

func TestSummarize(t *testing.T) {
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(100-i)) // 100 … 1
	}
	for _, test := range []struct {
		name          string
		samples       []float64
		p50, p99, max float64
		ok            bool
	}{
		{"none", nil, 0, 0, 0, false},
		{"one", []float64{7}, 7, 7, 7, true},
		{"two", []float64{9, 1}, 1, 9, 9, true},
		{"hundred", hundred, 50, 99, 100, true},
	} {
		r := summarize(test.name, CMS, test.samples)
		if r.N != len(test.samples) || r.P50 != test.p50 || r.P99 != test.p99 || r.Max != test.max || r.OK != test.ok {
			t.Errorf("%s: %+v", test.name, r)
		}
	}
}

// A row holds when the figure that its budget is about does: for create_cold the
// 99th percentile, whatever the highest sample was.
func TestJudge(t *testing.T) {
	for _, test := range []struct {
		row  Result
		want bool
	}{
		{Result{Name: "create_cold", N: 200, P99: 20, Max: 90}, true},
		{Result{Name: "create_cold", N: 200, P99: 20.1, Max: 20.1}, false},
		{Result{Name: "fork_pause", N: 10, P99: 2, Max: 3.1}, false},
		{Result{Name: "create_cold"}, false}, // not measured
	} {
		if r := judge(test.row); r.OK != test.want || r.Budget == nil {
			t.Errorf("%+v holds: %v, not %v", test.row, r.OK, test.want)
		}
	}
	if r := judge(Result{Name: "floor_create", N: 1, OK: true}); r.Budget != nil || !r.OK {
		t.Errorf("a row without budget: %+v", r)
	}
}

// Every row of the budget is in a report, also of a run that has measured nothing.
func TestReportIsComplete(t *testing.T) {
	b := &bench{rows: map[string]Result{}}
	b.row("create_cold", CMS, []float64{19})
	b.row("floor_create", CMS, []float64{1})
	r := b.report()
	if len(r.Results) != len(budget)+1 {
		t.Fatalf("%d rows, not %d", len(r.Results), len(budget)+1)
	}
	for i, l := range budget {
		if r.Results[i].Name != l.name || r.Results[i].Budget == nil || r.Results[i].OK != (l.name == "create_cold") {
			t.Errorf("row %d: %+v", i, r.Results[i])
		}
	}
	dir := t.TempDir()
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	back, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	var printed, again strings.Builder
	if err := r.Print(&printed); err != nil {
		t.Fatal(err)
	}
	if err := back.Print(&again); err != nil || again.String() != printed.String() {
		t.Errorf("read back (%v):\n%s\nnot\n%s", err, &again, &printed)
	}
	if !strings.Contains(printed.String(), "not measured") || !strings.Contains(printed.String(), "holds") {
		t.Errorf("printed:\n%s", &printed)
	}
}

func TestCompare(t *testing.T) {
	before := Report{Results: []Result{summarize("a", CMS, []float64{10}), summarize("b", CMS, []float64{10}), summarize("gone", CMS, []float64{1})}}
	after := Report{Results: []Result{summarize("a", CMS, []float64{11}), summarize("b", CMS, []float64{5}), summarize("new", CMS, []float64{2}), {Name: "empty"}}}
	var out strings.Builder
	if err := Compare(&out, before, after); err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(out.String()) {
		names = append(names, strings.Fields(line)[0])
	}
	if got := strings.Join(names, " "); got != "row b a new gone" {
		t.Errorf("rows in the order %q:\n%s", got, &out)
	}
	for _, want := range []string{"-50.0 %", "+10.0 %"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing:\n%s", want, &out)
		}
	}
}
