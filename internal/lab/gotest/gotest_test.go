package gotest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/lab"
)

func TestDiscover(t *testing.T) {
	t.Chdir("testdata/module")
	packages, err := List(t.Context(), "./...")
	if err != nil {
		t.Fatal(err)
	}
	selections, err := Discover(packages)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string][]string)
	for _, s := range selections {
		got[s.Package.ImportPath] = s.Names
	}
	want := map[string][]string{
		"example.com/module/direct": {"BenchmarkDirect", "TestDirect", "TestMethod", "TestTable"},
		"example.com/module/user":   {"TestBoot"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
}

func TestListRefusesUnknownPackages(t *testing.T) {
	t.Chdir("testdata/module")
	if packages, err := List(t.Context(), "./absent"); err == nil {
		t.Errorf("listed %v", packages)
	}
}

func TestBuildTreeMirrorsTheModule(t *testing.T) {
	root, err := filepath.Abs("testdata/module")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(root)
	packages, err := List(t.Context(), "./user")
	if err != nil {
		t.Fatal(err)
	}
	tree := t.TempDir()
	stale := filepath.Join(tree, "stale.test")
	if err := os.WriteFile(stale, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	build := func() os.FileInfo {
		t.Helper()
		binaries, err := buildTree(t.Context(), tree, []Selection{{packages[0], []string{"TestBoot"}}})
		if err != nil {
			t.Fatal(err)
		}
		if len(binaries) != 1 || binaries[0].file != "user/user.test" || binaries[0].dir != "user" {
			t.Fatalf("built %+v", binaries)
		}
		info, err := os.Stat(filepath.Join(tree, binaries[0].file))
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	first, second := build(), build()
	if !os.SameFile(first, second) || first.ModTime() != second.ModTime() {
		t.Error("a binary that is the same was written again: the image of the tree would be made anew")
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("a file of an earlier run stays: %v", err)
	}
}

func TestVerdict(t *testing.T) {
	broken := errors.New("no such program")
	for _, test := range []struct {
		name    string
		outcome lab.Outcome
		err     error
		want    []string // in the problem; none: no problem
		wantErr error
	}{
		{"good", lab.Outcome{}, nil, nil, nil},
		{"failed", lab.Outcome{Code: 1}, nil, []string{"exit status 1"}, nil},
		{"left something", lab.Outcome{Left: []string{"7 sleep"}}, nil, []string{"left processes behind", "7 sleep"}, nil},
		{"both", lab.Outcome{Code: 2, Left: []string{"7 sleep"}}, nil, []string{"exit status 2", "7 sleep"}, nil},
		{"panic", lab.Outcome{}, &lab.DeathError{Reason: lab.Panic, Console: []string{"BUG"}}, []string{"kernel panic", "BUG"}, nil},
		{"too slow", lab.Outcome{}, &lab.StoppedError{Cause: context.DeadlineExceeded}, []string{"time ran out"}, nil},
		{"the lab's fault", lab.Outcome{}, broken, nil, broken},
	} {
		problem, err := verdict(test.outcome, test.err)
		if err != test.wantErr || len(test.want) == 0 && problem != "" {
			t.Errorf("%s: %q, %v; want no problem and error %v", test.name, problem, err, test.wantErr)
		}
		for _, want := range test.want {
			if !strings.Contains(problem, want) {
				t.Errorf("%s: problem %q does not have %q", test.name, problem, want)
			}
		}
	}
}

func TestCounter(t *testing.T) {
	c := &counter{}
	output := "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestA/sub (0.00s)\n--- FAIL: TestB (1.00s)\n" +
		"--- SKIP: TestC (0.00s)\n" + strings.Repeat("x", 10_000) + "\n--- PASS: TestD (0.00s)\nPASS\n"
	for _, piece := range strings.SplitAfter(output, "S") { // lines arrive in pieces
		if n, err := c.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("wrote %d, %v", n, err)
		}
	}
	if c.passed != 2 || c.failed != 1 || c.skipped != 1 {
		t.Errorf("counted %d passed, %d failed, %d skipped; want 2, 1, 1", c.passed, c.failed, c.skipped)
	}
	for _, test := range []struct {
		counter counter
		want    string
	}{
		{counter{}, " [no tests to run]"},
		{counter{passed: 3}, " (lab: 3 passed)"},
		{counter{passed: 3, skipped: 1}, " (lab: 3 passed, 1 skipped)"},
	} {
		if got := test.counter.note(); got != test.want {
			t.Errorf("note %q, want %q", got, test.want)
		}
	}
}
