package lab

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestFromEnvironment(t *testing.T) {
	for _, test := range []struct {
		name string
		env  map[string]string
		want Config
	}{
		{"defaults", nil, Config{CPUs: 1, MemoryMiB: 8192, BootTimeout: defaultBootTimeout}},
		{"sizes", map[string]string{EnvCPUs: "4", EnvMemory: "2G"}, Config{CPUs: 4, MemoryMiB: 2048, BootTimeout: defaultBootTimeout}},
		{"bare memory is MiB", map[string]string{EnvMemory: "700"}, Config{CPUs: 1, MemoryMiB: 700, BootTimeout: defaultBootTimeout}},
		{"counted", map[string]string{EnvCounted: "1"}, Config{CPUs: 1, MemoryMiB: 8192, Counted: true, BootTimeout: defaultBootTimeout}},
		{"not counted", map[string]string{EnvCounted: "0"}, Config{CPUs: 1, MemoryMiB: 8192, BootTimeout: defaultBootTimeout}},
		{"lists", map[string]string{EnvIn: "/a/x,/b/y,", EnvTools: "strace"},
			Config{CPUs: 1, MemoryMiB: 8192, In: []string{"/a/x", "/b/y"}, Tools: []string{"strace"}, BootTimeout: defaultBootTimeout}},
	} {
		got, err := FromEnvironment(func(name string) string { return test.env[name] })
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %+v, %v; want %+v", test.name, got, err, test.want)
		}
	}
}

func TestFromEnvironmentRefuses(t *testing.T) {
	for _, test := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{EnvCPUs: "none"}, EnvCPUs},
		{map[string]string{EnvCPUs: "0"}, EnvCPUs},
		{map[string]string{EnvMemory: "6T"}, EnvMemory},
		{map[string]string{EnvMemory: "9999999999G"}, EnvMemory},
		{map[string]string{EnvMemory: "100M"}, "at least"},
		{map[string]string{EnvCounted: "1", EnvCPUs: "2"}, "1 processor"},
		{map[string]string{EnvIn: "/a/x,/b/x"}, "/in/x"},
	} {
		if _, err := FromEnvironment(func(name string) string { return test.env[name] }); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: error %v, want one with %q", test.env, err, test.want)
		}
	}
}

func TestProgramsIn(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"forkvm": 0o755, "notes": 0o644} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "tests"), 0o755); err != nil {
		t.Fatal(err)
	}
	got, err := ProgramsIn(dir)
	if want := []string{filepath.Join(dir, "forkvm")}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("programs %q, %v; want %q", got, err, want)
	}
	if got, err := ProgramsIn(filepath.Join(dir, "absent")); len(got) != 0 || err != nil {
		t.Errorf("programs of no directory: %q, %v", got, err)
	}
}
