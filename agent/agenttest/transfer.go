package agenttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"runtime"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/testkit/stream"
)

// B11: what is large arrives whole or is refused by name, and never halfway.
func B11(t *testing.T, g *Guest) {
	t.Run("arguments", func(t *testing.T) { arguments(t, g) })
	t.Run("files", func(t *testing.T) { files(t, g) })
	t.Run("no such directory", func(t *testing.T) {
		refused(t, g, "none/file", strings.NewReader("data"), proto.CodeFileNotFound)
	})
	t.Run("cut", func(t *testing.T) { cut(t, g) })
	t.Run("full file system", func(t *testing.T) { fullFileSystem(t, g) })
}

// arguments: what Linux takes works, more is a typed outcome.
func arguments(t *testing.T, g *Guest) {
	env := make([]string, 32)
	for i := range env {
		env[i] = fmt.Sprintf("V%d=%s", i, strings.Repeat("x", 100_000))
	}
	tests := []struct {
		name string
		cmd  client.Command
		ok   bool
	}{
		{"131,071 bytes", client.Command{Args: []string{"true", strings.Repeat("x", 131_071)}}, true},
		{"131,072 bytes", client.Command{Args: []string{"true", strings.Repeat("x", 131_072)}}, false},
		{"1 MiB", client.Command{Args: []string{"true", strings.Repeat("x", 1<<20)}}, false},
		{"3 MiB of environment", client.Command{Args: []string{"true"}, Env: env}, false},
		{"0.9 MB of environment", client.Command{Args: []string{"true"}, Env: env[:9]}, true},
	}
	for _, tt := range tests {
		r, _ := g.exec(t, tt.cmd)
		if tt.ok && r.ExitCode != 0 {
			t.Errorf("%s: got %+v (%v)", tt.name, r, r.Error)
		}
		if !tt.ok && (r.ExitCode != 126 || r.Error == nil || r.Error.Code != proto.CodeArgumentTooLong) {
			t.Errorf("%s: got %+v (%v), want 126 with %s", tt.name, r, r.Error, proto.CodeArgumentTooLong)
		}
	}
}

// files: any size, any name, byte by byte, with the mode.
func files(t *testing.T, g *Guest) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	sizes := []int64{0, 1, 18<<10 + 1, 64<<10 - 1, 64 << 10, 64<<10 + 1, 1 << 20}
	names := []string{"plain", "with space", "new\nline", "ünï", "bad\xff\xfeutf8", strings.Repeat("n", 255), "-dash", "'quote\"", "tab\t"}
	modes := []fs.FileMode{0o644, 0o600, 0o755, 0o755 | fs.ModeSetuid, 0o777 | fs.ModeSticky, 0o400}
	for i := range max(len(sizes), len(names)) {
		n, name, mode := sizes[i%len(sizes)], names[i%len(names)], modes[i%len(modes)]
		want, err := io.ReadAll(patterned(n, uint64(i)))
		if err != nil {
			t.Fatal(err)
		}
		file := path.Join(g.Dir, name)
		if stored, err := g.Put(ctx, client.File{Path: file, Mode: mode}, bytes.NewReader(want)); err != nil || stored != n {
			t.Errorf("put %q with %s: %d, %v", name, size(n), stored, err)
			continue
		}
		var got bytes.Buffer
		f, err := g.Get(ctx, file, &got)
		if err != nil || !bytes.Equal(got.Bytes(), want) || f.Mode != mode || f.Size != n {
			t.Errorf("get %q: %s of %s, %+v, %v", name, size(int64(got.Len())), size(n), f, err)
		}
	}
	listed, err := g.List(ctx, g.Dir)
	if err != nil || len(listed) < len(names) {
		t.Errorf("%d files, %v", len(listed), err)
	}
	nothingHalf(t, g, g.Dir)
}

// nothingHalf checks that a directory has no part of a file that did not arrive.
func nothingHalf(t testing.TB, g *Guest, dir string) {
	t.Helper()
	if left := g.sh(t, "ls -A '"+dir+"' | grep '^[.]forkvm' || true"); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

// refused puts a file that cannot be stored.
func refused(t *testing.T, g *Guest, file string, r io.Reader, code string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := g.Put(ctx, client.File{Path: path.Join(g.Dir, file)}, r); !errors.Is(err, &client.Error{Code: code}) {
		t.Errorf("error %v, want %s", err, code)
	}
}

// cut: a put whose host goes away in the middle leaves what was there.
func cut(t *testing.T, g *Guest) {
	file := path.Join(g.Dir, "cut")
	for _, before := range []string{"", "old"} {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if before != "" {
			if _, err := g.Put(ctx, client.File{Path: file}, strings.NewReader(before)); err != nil {
				t.Fatal(err)
			}
		}
		r, w := io.Pipe()
		go func() {
			_, _ = w.Write(make([]byte, 300_000))
			cancel()
			w.Close()
		}()
		if _, err := g.Put(ctx, client.File{Path: file}, r); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want the context's", err)
		}
		r.Close()
		g.eventually(t, "nothing is left of the file that did not arrive", patience, func() bool {
			return g.sh(t, "ls -A | grep -c '^[.]forkvm' || true") == "0"
		})
		if got := g.sh(t, "cat cut 2>/dev/null || true"); got != before {
			t.Errorf("there is %q, want %q", got, before)
		}
	}
}

// fullFileSystem: a file for which there is no room leaves the one before it.
func fullFileSystem(t *testing.T, g *Guest) {
	if r, o := g.exec(t, script("mkdir small && mount -t tmpfs -o size=1m small small")); r.ExitCode != 0 {
		t.Skipf("needs to mount a tmpfs: %s", &o.stderr)
	}
	t.Cleanup(func() { _, _, _ = g.try(script("umount small")) })
	g.sh(t, "echo old >small/file")
	refused(t, g, "small/file", patterned(8<<20, 1), proto.CodeNoSpace)
	if got := g.sh(t, "cat small/file"); got != "old" {
		t.Errorf("there is %.20q, want the file from before", got)
	}
	nothingHalf(t, g, path.Join(g.Dir, "small"))
}

// LongFile puts a file of so many bytes into a directory with room for it and gets it back: neither side needs more than
// 16 MiB for that, whatever the size.
func LongFile(t *testing.T, g *Guest, dir string, n int64) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*patience)
	defer cancel()
	file := path.Join(dir, "long")
	defer func() { _ = g.Remove(context.Background(), file, false) }()
	usage := func() (host, guest int64) {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		u, err := g.Usage(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return int64(m.Sys - m.HeapReleased), u.Agent.ResidentBytes
	}
	host, guest := usage()
	if _, err := g.Put(ctx, client.File{Path: file}, patterned(n, 3)); err != nil {
		t.Fatal(err)
	}
	back := stream.NewChecker(3)
	if f, err := g.Get(ctx, file, back); err != nil || f.Size != n || back.Count() != n {
		t.Errorf("what came back differs: %+v, %d bytes, %v", f, back.Count(), err)
	}
	hostAfter, guestAfter := usage()
	t.Logf("%s and back: host %+d KiB, guest agent %+d KiB", size(n), (hostAfter-host)>>10, (guestAfter-guest)>>10)
	if hostAfter-host > 16<<20 || g.Alone && guestAfter-guest > 16<<20 {
		t.Errorf("memory grew by %d KiB in the host's process, %d KiB in the guest agent", (hostAfter-host)>>10, (guestAfter-guest)>>10)
	}
}
