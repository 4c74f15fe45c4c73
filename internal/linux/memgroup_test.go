package linux

import (
	"os"
	"path/filepath"
	"testing"
)

// groups lays out a hierarchy of control groups: files by group.
func groups(t *testing.T, membership string, files map[string]map[string]string) (root, file string) {
	t.Helper()
	root = t.TempDir()
	for group, contents := range files {
		dir := filepath.Join(root, group)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, text := range contents {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	file = filepath.Join(t.TempDir(), "cgroup")
	if err := os.WriteFile(file, []byte(membership), 0o600); err != nil {
		t.Fatal(err)
	}
	return root, file
}

func TestMemoryGroup(t *testing.T) {
	const cached = "anon 100\nfile 900\ninactive_file 300\nactive_file 200\nslab_reclaimable 50\nslab_unreclaimable 7\n"
	unlimited := map[string]string{"memory.max": "max\n", "memory.high": "max\n", "memory.current": "10\n", "memory.stat": cached}
	for _, c := range []struct {
		name, membership string
		files            map[string]map[string]string
		want             GroupMemory
		found            bool
	}{
		{"no limit", "0::/a/b\n", map[string]map[string]string{"a": unlimited, "a/b": unlimited}, GroupMemory{}, false},
		{"own limit, page cache aside", "0::/a/b\n", map[string]map[string]string{
			"a":   unlimited,
			"a/b": {"memory.max": "4000\n", "memory.high": "max\n", "memory.current": "1600\n", "memory.stat": cached},
		}, GroupMemory{Path: "/a/b", Limit: 4000, Used: 1050}, true},
		{"the one above has less room", "0::/a/b\n", map[string]map[string]string{
			"a":   {"memory.max": "5000\n", "memory.high": "max\n", "memory.current": "4900\n", "memory.stat": ""},
			"a/b": {"memory.max": "4000\n", "memory.high": "max\n", "memory.current": "1600\n", "memory.stat": cached},
		}, GroupMemory{Path: "/a", Limit: 5000, Used: 4900}, true},
		{"slowed down before", "1:name=systemd:/x\n0::/a\n", map[string]map[string]string{
			"a": {"memory.max": "max\n", "memory.high": "3000\n", "memory.current": "100\n", "memory.stat": cached},
		}, GroupMemory{Path: "/a", Limit: 3000}, true},
		{"the root of a container", "0::/\n", map[string]map[string]string{
			".": {"memory.max": "3000\n", "memory.current": "100\n", "memory.stat": ""},
		}, GroupMemory{Path: "/", Limit: 3000, Used: 100}, true},
		{"outside of the namespace", "0::/../other\n", map[string]map[string]string{
			".": {"memory.max": "3000\n", "memory.current": "100\n", "memory.stat": ""},
		}, GroupMemory{}, false},
		{"version 1", "4:memory:/a\n", map[string]map[string]string{"a": unlimited}, GroupMemory{}, false},
		{"a group that has gone", "0::/gone\n", nil, GroupMemory{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, file := groups(t, c.membership, c.files)
			got, found := memoryGroup(root, file)
			if got != c.want || found != c.found {
				t.Errorf("%+v, %v; want %+v, %v", got, found, c.want, c.found)
			}
		})
	}
	if over := (GroupMemory{Limit: 1, Used: 2}); over.Free() != 0 {
		t.Errorf("%d free above the limit", over.Free())
	}
}

func TestSameGroup(t *testing.T) {
	if !SameGroup(os.Getpid(), os.Getpid()) {
		t.Error("this process is in other groups than itself")
	}
	if SameGroup(os.Getpid(), 1<<30) {
		t.Error("a process that is not there is in our groups")
	}
}
