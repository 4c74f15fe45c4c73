package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// exported is what snapshot export says.
type exported struct {
	Bytes    int64
	NewBytes int64 `json:"new_bytes"`
}

func (h *host) archive(name, dir string) (e exported) {
	h.t.Helper()
	if err := json.Unmarshal([]byte(h.must("snapshot", "export", name, "--to", dir, "-o", "json")), &e); err != nil {
		h.t.Fatal(err)
	}
	return e
}

// A second task that differs from the first by a commit's worth of files costs
// little in an archive, and a snapshot works on another machine that it came to
// through a file, after an import that was cut off, or through the archive.
func TestExportAndImport(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("builder")
	h.sh("builder", "mkdir -p /root/work; for i in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=/root/work/$i bs=64k count=4 2>/dev/null; done; sync")
	sums := h.sh("builder", "cat /root/work/* | sha256sum")
	h.must("snapshot", "builder", "first")
	h.sh("builder", "echo 'the fix' > /root/work/fix; sync")
	h.must("snapshot", "builder", "second")

	dir := t.TempDir()
	first := h.archive("first", dir)
	second := h.archive("second", dir)
	t.Logf("first task: %d KiB for files of %d KiB; second: %d KiB more (%.1f %%)",
		first.NewBytes>>10, first.Bytes>>10, second.NewBytes>>10, 100*float64(second.NewBytes)/float64(first.NewBytes))
	if second.NewBytes > first.NewBytes/5 {
		t.Errorf("the second task costs %d bytes beside %d of the first", second.NewBytes, first.NewBytes)
	}
	file := filepath.Join(dir, "second.forkvm")
	h.must("snapshot", "export", "second", file)

	other := newHost(t, t.TempDir())
	half := filepath.Join(dir, "half")
	b, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(half, b[:len(b)/2], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	other.refused("snapshot_corrupt", "snapshot", "import", half)
	if got := other.must("snapshot", "ls", "-q"); got != "" {
		t.Errorf("half an import is listed: %s", got)
	}
	if got := strings.TrimSpace(other.must("snapshot", "import", file)); got != "second" {
		t.Errorf("imported as %q", got)
	}
	other.must("snapshot", "import", "--from", dir, "first", "--name", "start")
	var views []struct {
		OwnBytes   int64 `json:"own_bytes"`
		TotalBytes int64 `json:"total_bytes"`
	}
	if err := json.Unmarshal([]byte(other.must("snapshot", "inspect", "start")), &views); err != nil || len(views) != 1 || views[0].OwnBytes > views[0].TotalBytes/10 {
		t.Errorf("what both have is not shared: %v, %+v", err, views)
	}
	if n := other.tree()["second"]; n.Parent != "start" {
		t.Errorf("second is at %+v in the tree", n)
	}
	other.must("snapshot", "check")
	for name, fix := range map[string]string{"second": "the fix", "start": "none"} {
		other.must("create", slowly, "--snapshot", name, "--name", "vm-"+name)
		if got := other.sh("vm-"+name, "cat /root/work/fix 2>/dev/null || echo none; cat /root/work/[1-8] | sha256sum"); got != fix+"\n"+sums {
			t.Errorf("%s shows %q", name, got)
		}
	}
}
