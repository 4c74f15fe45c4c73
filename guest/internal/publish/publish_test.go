package publish

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

var errStop = errors.New("stop")

func TestFileAppearsWholeOrNotAtAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, text := range []string{"first", "second"} {
		err := File(path, 0o444, func(f *os.File) error {
			_, err := f.WriteString(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	err := File(path, 0o644, func(f *os.File) error {
		f.WriteString("half of the th")
		return errStop
	})
	if got, _ := os.ReadFile(path); !errors.Is(err, errStop) || string(got) != "second" {
		t.Errorf("after an error: %q, %v", got, err)
	}
	wantEntries(t, filepath.Dir(path), 1)
}

func TestDirectoryAppearsWholeOrNotAtAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "directory")
	fill := func(result error) func(string) error {
		return func(dir string) error {
			return errors.Join(os.WriteFile(filepath.Join(dir, "file"), nil, 0o644), result)
		}
	}
	if err := Directory(path, fill(errStop)); !errors.Is(err, errStop) {
		t.Errorf("got %v", err)
	}
	wantEntries(t, filepath.Dir(path), 0)
	// An empty directory gives way.
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Directory(path+"/", fill(nil)); err != nil {
		t.Fatal(err)
	}
	wantEntries(t, path, 1)
	if err := Directory(path, fill(nil)); !errors.Is(err, os.ErrExist) {
		t.Errorf("over one that is there: %v", err)
	}
	wantEntries(t, filepath.Dir(path), 1)
}

func wantEntries(t *testing.T, dir string, count int) {
	t.Helper()
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != count {
		t.Errorf("%s holds %v, %v; want %d", dir, entries, err, count)
	}
}
