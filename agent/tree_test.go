package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/agent/tree"
)

func openRoot(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

func isCode(err error, code string) bool { return errors.Is(err, &client.Error{Code: code}) }

// Trees of more bytes than any buffer go there and come back the same.
func TestUploadAndDownload(t *testing.T) {
	g := start(t, agent.Config{})
	ctx := context.Background()
	from, to := t.TempDir(), t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	for i := range 5 {
		dir := filepath.Join(from, fmt.Sprint("d", i))
		if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "big"), big, 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	up, err := g.Upload(ctx, openRoot(t, from), filepath.Join(g.dir, "made", "here"), false)
	if err != nil || up.Bytes != int64(5*len(big)) {
		t.Fatalf("%+v, %v", up, err)
	}
	down, err := g.Download(ctx, filepath.Join(g.dir, "made", "here"), openRoot(t, to))
	if err != nil || down != up {
		t.Fatalf("%+v up, %+v down, %v", up, down, err)
	}
	for i := range 5 {
		if got, err := os.ReadFile(filepath.Join(to, fmt.Sprint("d", i), "big")); err != nil || !bytes.Equal(got, big) {
			t.Errorf("file %d: %d bytes, %v", i, len(got), err)
		}
	}
}

// One request empties directories, takes away what a tree replaces, and sums up what is
// there then.
func TestPlaceTree(t *testing.T) {
	g := start(t, agent.Config{})
	from := t.TempDir()
	write := func(path string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("content"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(from, "new"))
	for _, name := range []string{"to/old/file", "to/.git/config", "empty/left"} {
		write(filepath.Join(g.dir, name))
	}
	place := func(p client.Placement) client.TreeStats {
		t.Helper()
		var archive bytes.Buffer
		if _, err := tree.Pack(&archive, openRoot(t, from)); err != nil {
			t.Fatal(err)
		}
		stats, err := g.PlaceTree(t.Context(), p, &archive)
		if err != nil {
			t.Fatal(err)
		}
		return stats
	}
	stats := place(client.Placement{
		Dir: filepath.Join(g.dir, "to"), Replace: true, Spare: []string{".git"}, Sum: true,
		Vacate: []client.EmptyDirectory{{Path: filepath.Join(g.dir, "empty"), Mode: 0o755}},
	})
	sum, err := tree.SumRoot(openRoot(t, filepath.Join(g.dir, "to")))
	if err != nil || stats.Sum != sum {
		t.Errorf("the sum is %s, not %s, %v", stats.Sum, sum, err)
	}
	for name, want := range map[string]bool{"to/new": true, "to/.git/config": true, "to/old": false, "empty": true, "empty/left": false} {
		if _, err := os.Lstat(filepath.Join(g.dir, name)); (err == nil) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A link in its place goes away, not what it leads to.
	if err := os.Symlink("to", filepath.Join(g.dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := g.GetExactTree(t.Context(), filepath.Join(g.dir, "link"), io.Discard); !isCode(err, proto.CodeNotADirectory) {
		t.Errorf("a link to a directory: %v", err)
	}
	place(client.Placement{Dir: filepath.Join(g.dir, "link"), Replace: true})
	if info, err := os.Lstat(filepath.Join(g.dir, "link")); err != nil || !info.IsDir() {
		t.Errorf("link: %v, %v", info, err)
	}
	if _, err := os.Lstat(filepath.Join(g.dir, "to/.git/config")); err != nil {
		t.Error(err)
	}
	for _, bad := range []client.Placement{{Dir: "/", Replace: true}, {Dir: g.dir + "/to", Replace: true, Spare: []string{"["}}} {
		if _, err := g.PlaceTree(t.Context(), bad, bytes.NewReader(nil)); !isCode(err, proto.CodeInvalidRequest) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func TestTreesThatCannotBe(t *testing.T) {
	g := start(t, agent.Config{})
	ctx := context.Background()
	file := filepath.Join(g.dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Download(ctx, filepath.Join(g.dir, "none"), openRoot(t, t.TempDir())); !isCode(err, proto.CodeFileNotFound) {
		t.Errorf("directory that is not there: %v", err)
	}
	if _, err := g.Download(ctx, file, openRoot(t, t.TempDir())); !isCode(err, proto.CodeNotADirectory) {
		t.Errorf("download of a file: %v", err)
	}
	if _, err := g.Upload(ctx, openRoot(t, t.TempDir()), file, false); !isCode(err, proto.CodeNotADirectory) {
		t.Errorf("upload over a file: %v", err)
	}
	if _, err := g.PutTree(ctx, g.dir, bytes.NewReader([]byte("no tar at all, but long enough to be taken for a part of one")), false); err == nil {
		t.Error("no error for what is no tar stream")
	}
}

func TestDirectoryOperations(t *testing.T) {
	g := start(t, agent.Config{})
	ctx := context.Background()
	at := func(name string) string { return filepath.Join(g.dir, "d", name) }
	if err := os.Mkdir(at(""), 0o750); err != nil {
		t.Fatal(err)
	}
	const n = 4321 // more than one frame has
	for i := range n {
		if err := os.WriteFile(at(fmt.Sprintf("%05d", i)), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files, err := g.List(ctx, at(""))
	if err != nil || len(files) != n || files[0].Path != "00000" || files[n-1].Path != "04320" || files[7].Size != 1 {
		t.Errorf("%d entries, %v", len(files), err)
	}
	if f, err := g.Stat(ctx, at("")); err != nil || f.Kind != client.KindDirectory || f.Mode != 0o750 {
		t.Errorf("stat: %+v, %v", f, err)
	}
	if err := g.Move(ctx, at("00001"), at("00000")); err != nil {
		t.Error(err)
	}
	if _, err := g.Stat(ctx, at("00001")); !isCode(err, proto.CodeFileNotFound) {
		t.Errorf("moved file: %v", err)
	}
	if err := g.Remove(ctx, at(""), false); !isCode(err, proto.CodeNotEmpty) {
		t.Errorf("remove of a full directory: %v", err)
	}
	if err := g.Remove(ctx, at(""), true); err != nil {
		t.Error(err)
	}
	if err := g.Remove(ctx, at(""), true); !isCode(err, proto.CodeFileNotFound) {
		t.Errorf("remove of nothing: %v", err)
	}
	if err := g.Remove(ctx, "/", true); !isCode(err, proto.CodeInvalidRequest) {
		t.Errorf("remove of the root: %v", err)
	}
}

// A guest with another generation is not touched.
func TestTreeOperationsKeepGenerations(t *testing.T) {
	g := start(t, agent.Config{})
	ctx := context.Background()
	other := g.with(client.Config{Generation: "11111111-1111-1111-1111-111111111111"})
	_, upload := other.Upload(ctx, openRoot(t, t.TempDir()), filepath.Join(g.dir, "x"), false)
	_, download := other.Download(ctx, g.dir, openRoot(t, t.TempDir()))
	for name, err := range map[string]error{
		"upload": upload, "download": download,
		"remove": other.Remove(ctx, filepath.Join(g.dir, "x"), true),
		"move":   other.Move(ctx, filepath.Join(g.dir, "x"), filepath.Join(g.dir, "y")),
	} {
		if !isCode(err, proto.CodeGenerationMismatch) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
