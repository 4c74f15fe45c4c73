package gotest

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
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
