package lab

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func testCache(t *testing.T) cache {
	t.Helper()
	c, err := openCache(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCacheBuildsOnce(t *testing.T) {
	c := testCache(t)
	var built atomic.Int32
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			path, err := c.get("entry", func(path string) error {
				built.Add(1)
				time.Sleep(20 * time.Millisecond)
				return os.WriteFile(path, []byte("content"), 0o644)
			})
			if got, _ := os.ReadFile(path); err != nil || string(got) != "content" {
				t.Errorf("entry holds %q, %v", got, err)
			}
		})
	}
	group.Wait()
	if built.Load() != 1 {
		t.Errorf("built %d times, want once", built.Load())
	}
	left, err := os.ReadDir(c.dir)
	if err != nil || len(left) != 1 {
		t.Errorf("cache holds %v, %v; want the entry only", left, err)
	}
}

func TestCacheKeepsNoHalfEntry(t *testing.T) {
	c := testCache(t)
	broken := errors.New("broken")
	_, err := c.get("entry", func(path string) error {
		if err := os.WriteFile(path, []byte("half"), 0o644); err != nil {
			t.Error(err)
		}
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("error %v, want the builder's", err)
	}
	if left, _ := os.ReadDir(c.dir); len(left) != 0 {
		t.Errorf("cache holds %v after a failed build, want nothing", left)
	}
}

func TestCachePrunes(t *testing.T) {
	c := testCache(t)
	now := time.Now()
	for name, age := range map[string]time.Duration{
		"old": keepFor + time.Hour, "young": time.Hour * 2, ".build-dead": 3 * time.Hour, ".build-alive": time.Minute, "run": keepFor * 2,
	} {
		path := filepath.Join(c.dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, now.Add(-age), now.Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.prune(now); err != nil {
		t.Fatal(err)
	}
	var left []string
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		left = append(left, entry.Name())
	}
	if got, want := strings.Join(left, " "), ".build-alive run young"; got != want {
		t.Errorf("left %q, want %q", got, want)
	}
}

func TestStatKeySeesChanges(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "sub", "file")
	key := func() string {
		t.Helper()
		k, err := statKey(dir)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	write("one")
	seen := map[string]string{key(): "first"}
	if again := key(); seen[again] == "" {
		t.Error("two keys of an unchanged tree differ")
	}
	for name, change := range map[string]func(){
		"size": func() { write("three") },
		"mode": func() { os.Chmod(file, 0o600) },
		"time": func() { os.Chtimes(file, time.Unix(1, 2), time.Unix(1, 2)) },
		"name": func() { os.Rename(file, file+"2"); file += "2" },
	} {
		change()
		k := key()
		if other, same := seen[k]; same {
			t.Errorf("key after change of %s is the one of %s", name, other)
		}
		seen[k] = name
	}
	if _, err := statKey(filepath.Join(dir, "absent")); err == nil {
		t.Error("a key for what does not exist")
	}
}

func TestStaleRunDirIsRemoved(t *testing.T) {
	c := testCache(t)
	dead := filepath.Join(c.dir, runBase, runPrefix+"dead")
	if err := os.MkdirAll(filepath.Join(dead, "files"), 0o755); err != nil {
		t.Fatal(err)
	}
	first, err := newRunDir(c)
	if err != nil {
		t.Fatal(err)
	}
	second, err := newRunDir(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); !os.IsNotExist(err) {
		t.Errorf("directory of a dead owner is still there: %v", err)
	}
	if _, err := os.Stat(first.path); err != nil {
		t.Errorf("directory of a live owner is gone: %v", err)
	}
	for _, dir := range []*runDir{first, second} {
		if err := dir.remove(); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(c.dir, runBase)); len(left) != 0 {
		t.Errorf("left %v, want nothing", left)
	}
}
