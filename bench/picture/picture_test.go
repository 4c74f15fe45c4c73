package picture

import (
	"os"
	"testing"

	"github.com/forkvm/forkvm/bench"
)

func TestDraw(t *testing.T) {
	points := []bench.Point{{X: 10, Y: bench.Result{N: 1, P50: 1, Max: 2}}, {X: 1000, Y: bench.Result{N: 1, P50: 3, Max: 3}}}
	curves := []bench.Curve{
		{Name: "one", Title: "first", X: "pages", Y: "cms", Points: points},
		{Name: "two", Title: "second", X: "pages", Y: "cms", Points: points},
		{Name: "three", Title: "third", X: "MiB", Y: "cms", Points: points},
	}
	paths, err := Draw(t.TempDir(), curves)
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) != 4 {
		t.Errorf("drawn: %q, not one SVG and one PNG for each of two axes", paths)
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestDrawNothing(t *testing.T) {
	if paths, err := Draw(t.TempDir(), nil); err != nil || paths != nil {
		t.Errorf("drawn: %q, %v", paths, err)
	}
}
