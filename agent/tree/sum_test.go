package tree_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/forkvm/forkvm/agent/tree"
)

// sumOf makes a tree of what lay says and sums it up.
func sumOf(t *testing.T, lay func(dir string)) string {
	t.Helper()
	dir := t.TempDir()
	lay(dir)
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	sum, err := tree.SumRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// Everything of a tree but times and owners is in its sum, and nothing else.
func TestSum(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lay := func(dir string) {
		must(os.Mkdir(filepath.Join(dir, "d"), 0o755))
		must(os.WriteFile(filepath.Join(dir, "d/file"), []byte("content"), 0o644))
		must(os.WriteFile(filepath.Join(dir, "d-file"), nil, 0o755))
		must(os.Symlink("d/file", filepath.Join(dir, "link")))
	}
	want := sumOf(t, lay)
	if again := sumOf(t, lay); again != want {
		t.Errorf("two trees with the same entries have the sums %s and %s", want, again)
	}
	for name, change := range map[string]func(dir string){
		"content": func(dir string) { must(os.WriteFile(filepath.Join(dir, "d/file"), []byte("Content"), 0o644)) },
		"mode":    func(dir string) { must(os.Chmod(filepath.Join(dir, "d/file"), 0o755)) },
		"added":   func(dir string) { must(os.Mkdir(filepath.Join(dir, "new"), 0o755)) },
		"removed": func(dir string) { must(os.Remove(filepath.Join(dir, "d-file"))) },
		"a link": func(dir string) {
			must(os.Remove(filepath.Join(dir, "link")))
			must(os.Symlink("d", filepath.Join(dir, "link")))
		},
		"a link in the place of a file": func(dir string) {
			must(os.Rename(filepath.Join(dir, "d/file"), filepath.Join(dir, "d-file")))
			must(os.Symlink("../d-file", filepath.Join(dir, "d/file")))
		},
	} {
		got := sumOf(t, func(dir string) { lay(dir); change(dir) })
		if got == want {
			t.Errorf("%s: the sum is the same", name)
		}
	}
}
