package lab

import (
	"os"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/lab/wire"
)

func TestEmulatorArgs(t *testing.T) {
	disks := []disk{
		{path: "/run/scratch", own: true, mount: wire.Mount{Serial: "scratch"}},
		{path: "/cache/a,b", mount: wire.Mount{Serial: "in0"}},
	}
	for _, test := range []struct {
		golden string
		config Config
	}{
		{"testdata/args.txt", Config{CPUs: 2, MemoryMiB: 6144}},
		{"testdata/args-counted.txt", Config{CPUs: 1, MemoryMiB: 1024, Counted: true}},
	} {
		got := strings.Join(emulatorArgs(test.config, "/k/vmlinux", "/k/initrd", disks), "\n") + "\n"
		want, err := os.ReadFile(test.golden)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: arguments are\n%s\nwant\n%s", test.golden, got, want)
		}
	}
}

func TestConsoleKeepsTheLastLines(t *testing.T) {
	var c console
	for range 2 * consoleLines {
		c.Write([]byte("filler\r\n\r\n"))
	}
	c.Write([]byte("\x1bc\x1b[?7l[ 1.0] Kernel pa"))
	if _, panicked := c.last(); panicked {
		t.Error("panic seen before its line was complete")
	}
	c.Write([]byte("nic - not syncing: test\nrest"))
	lines, panicked := c.last()
	if !panicked {
		t.Error("panic not seen")
	}
	if n := len(lines); n != consoleLines+1 || lines[n-1] != "rest" || lines[n-2] != "[ 1.0] Kernel panic - not syncing: test" {
		t.Errorf("%d lines, the last of them %q; want %d, clean, with the unfinished one", n, lines[max(0, n-2):], consoleLines+1)
	}
}
