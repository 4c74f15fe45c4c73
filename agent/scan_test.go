package agent_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

// A scan finds every file with what tells one state of it from another, and every
// process.
func TestScan(t *testing.T) {
	g := start(t, agent.Config{})
	dir := filepath.Join(g.dir, "tree")
	var want []string
	add := func(name string, make func(path string) error) {
		path := filepath.Join(dir, name)
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		want = append(want, path)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	add("sub", func(p string) error { return os.Mkdir(p, 0o750) })
	add("sub/\xff\n", func(p string) error { return os.WriteFile(p, []byte("12345"), 0o640) })
	add("link", func(p string) error { return os.Symlink("sub/../nowhere", p) })
	for i := range 600 {
		add(fmt.Sprintf("sub/%03d", i), func(p string) error { return os.WriteFile(p, nil, 0o644) })
	}
	s, err := g.Scan(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]client.ScannedFile{}
	for _, f := range s.Files {
		files[string(f.Path)] = f
	}
	if len(files) != len(want) || s.ScanResult.Files != int64(len(want)) || len(s.Unread) > 0 {
		t.Errorf("%d files, %d counted, want %d; unread: %v", len(files), s.ScanResult.Files, len(want), s.Unread)
	}
	for _, path := range want {
		if _, found := files[path]; !found {
			t.Fatalf("%q is missing", path)
		}
	}
	if f := files[want[1]]; f.Kind != proto.KindFile || f.Size != 5 || f.Mode != 0o640 || f.CtimeNS == 0 || f.Inode == 0 || int(f.UID) != os.Getuid() {
		t.Errorf("got %+v", f)
	}
	if f := files[want[2]]; f.Kind != proto.KindLink || f.Target != "sub/../nowhere" {
		t.Errorf("got %+v", f)
	}
	self := slices.IndexFunc(s.Processes, func(p client.ProcessInfo) bool { return p.PID == os.Getpid() })
	if self < 0 {
		t.Fatalf("this process is not among %d", len(s.Processes))
	}
	if p := s.Processes[self]; p.Start == 0 || p.Parent != os.Getppid() || string(p.Args[0]) != os.Args[0] {
		t.Errorf("got %+v", p)
	}
	// A file that was written again with the same size is another state of it.
	if err := os.WriteFile(want[1], []byte("54321"), 0o640); err != nil {
		t.Fatal(err)
	}
	again, err := g.Scan(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range again.Files {
		if changed := f != files[string(f.Path)]; changed != (string(f.Path) == want[1]) {
			t.Errorf("%q is another: %v", f.Path, changed)
		}
	}
	if _, err := g.Scan(context.Background(), filepath.Join(g.dir, "nowhere")); err != nil && !errors.Is(err, &client.Error{Code: proto.CodeFileNotFound}) {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// What the kernel makes up is not scanned.
func TestScanLeavesOutProc(t *testing.T) {
	g := start(t, agent.Config{})
	s, err := g.Scan(context.Background(), "/proc")
	if err != nil || len(s.Files) > 0 || len(s.Processes) == 0 {
		t.Errorf("%d files, %d processes: %v", len(s.Files), len(s.Processes), err)
	}
}
