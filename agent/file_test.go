package agent_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/testkit"
)

// Case B11, the files: any size, any name, byte by byte, with the mode.
func TestB11Files(t *testing.T) {
	g := start(t, agent.Config{})
	sizes := []int{0, 1, 18<<10 + 1, 64<<10 - 1, 64 << 10, 64<<10 + 1, 1 << 20, 5<<20 + 1}
	names := []string{"plain", "with space", "new\nline", "ünï", "bad\xff\xfeutf8", strings.Repeat("n", 255), "-dash", "'quote\"", "tab\t"}
	modes := []fs.FileMode{0o644, 0o600, 0o755, 0o755 | fs.ModeSetuid, 0o777 | fs.ModeSticky, 0o400}
	for i := range max(len(sizes), len(names)) {
		size, name, mode := sizes[i%len(sizes)], names[i%len(names)], modes[i%len(modes)]
		t.Run(fmt.Sprintf("%d bytes, %.20q", size, name), func(t *testing.T) {
			want := make([]byte, size)
			rand.Read(want)
			path := filepath.Join(g.dir, name)
			n, err := g.Put(context.Background(), client.File{Path: path, Mode: mode}, bytes.NewReader(want))
			if err != nil || n != int64(size) {
				t.Fatalf("put %d bytes: %v", n, err)
			}
			onDisk, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(onDisk, want) {
				t.Fatalf("file differs (%v)", err)
			}
			var got bytes.Buffer
			f, err := g.Get(context.Background(), path, &got)
			if err != nil || !bytes.Equal(got.Bytes(), want) {
				t.Fatalf("get: %d bytes, %v", got.Len(), err)
			}
			if f.Mode != mode || f.Size != int64(size) || int(f.UID) != os.Getuid() || time.Since(f.Modified) > time.Hour {
				t.Errorf("got %+v, want mode %v", f, mode)
			}
		})
	}
	noTemporaries(t, g.dir)
}

// Case B11: a long file needs no memory for its length, in neither direction.
func TestB11LongFileInConstantMemory(t *testing.T) {
	g := start(t, agent.Config{})
	const size = 192 << 20
	path := filepath.Join(g.dir, "long")
	hash := sha256.New()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	if _, err := g.Put(context.Background(), client.File{Path: path}, io.TeeReader(io.LimitReader(&pattern{}, size), hash)); err != nil {
		t.Fatal(err)
	}
	want := hash.Sum(nil)
	hash.Reset()
	if _, err := g.Get(context.Background(), path, hash); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if !bytes.Equal(hash.Sum(nil), want) {
		t.Error("what came back differs")
	}
	// The heap is that of both sides together.
	if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 16<<20 {
		t.Errorf("heap grew by %d KiB", grown>>10)
	}
}

// pattern is an endless stream that differs from page to page.
type pattern struct{ n uint64 }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(p.n >> (p.n % 24))
		p.n++
	}
	return len(b), nil
}

func TestB11FileErrors(t *testing.T) {
	g := start(t, agent.Config{})
	dir := filepath.Join(g.dir, "dir")
	os.Mkdir(dir, 0o755)
	fifo := filepath.Join(g.dir, "fifo")
	syscall.Mkfifo(fifo, 0o600)
	plain := filepath.Join(g.dir, "plain")
	os.WriteFile(plain, []byte("x"), 0o644)
	tests := []struct {
		name, path string
		put, get   string // error codes
	}{
		{"no such directory", dir + "/none/file", proto.CodeFileNotFound, proto.CodeFileNotFound},
		{"directory", dir, proto.CodeIsADirectory, proto.CodeIsADirectory},
		{"directory with slash", dir + "/", proto.CodeIsADirectory, proto.CodeIsADirectory},
		{"below a file", plain + "/x", proto.CodeNotADirectory, proto.CodeNotADirectory},
		{"relative", "plain", proto.CodeInvalidRequest, proto.CodeInvalidRequest},
		{"NUL", plain + "\x00", proto.CodeInvalidRequest, proto.CodeInvalidRequest},
		{"empty", "", proto.CodeInvalidRequest, proto.CodeInvalidRequest},
		{"name of 256 bytes", filepath.Join(g.dir, strings.Repeat("n", 256)), proto.CodeNameTooLong, proto.CodeNameTooLong},
		{"fifo", fifo, "", proto.CodeNotARegularFile},
		{"device", "/dev/null/", proto.CodeIsADirectory, proto.CodeIsADirectory},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := g.Get(context.Background(), tt.path, io.Discard)
			if !errors.Is(err, &client.Error{Code: tt.get}) {
				t.Errorf("get: error %v, want %s", err, tt.get)
			}
			if tt.put == "" {
				return
			}
			_, err = g.Put(context.Background(), client.File{Path: tt.path}, strings.NewReader(strings.Repeat("data", 100_000)))
			if !errors.Is(err, &client.Error{Code: tt.put}) {
				t.Errorf("put: error %v, want %s", err, tt.put)
			}
		})
	}
	noTemporaries(t, g.dir)
}

// A file is replaced, not written into: an open one keeps its content, a
// symbolic link gives way and its target is untouched.
func TestPutReplaces(t *testing.T) {
	g := start(t, agent.Config{})
	path, link := filepath.Join(g.dir, "file"), filepath.Join(g.dir, "link")
	os.WriteFile(path, []byte("old"), 0o600)
	os.Symlink(path, link)
	open, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for _, p := range []string{link, path} {
		if _, err := g.Put(context.Background(), client.File{Path: p}, strings.NewReader("new")); err != nil {
			t.Fatal(err)
		}
		if p == link {
			if b, _ := os.ReadFile(path); string(b) != "old" {
				t.Error("put wrote through a symbolic link")
			}
		}
	}
	if b, _ := io.ReadAll(open); string(b) != "old" {
		t.Errorf("an open file changed to %q", b)
	}
}

func TestB11FullFileSystem(t *testing.T) {
	testkit.RequireRoot(t)
	g := start(t, agent.Config{})
	small := filepath.Join(g.dir, "small")
	os.Mkdir(small, 0o755)
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=1m"); err != nil {
		testkit.Require(t, "mount", "needs to mount a tmpfs: "+err.Error())
	}
	t.Cleanup(func() { syscall.Unmount(small, syscall.MNT_DETACH) })
	path := filepath.Join(small, "file")
	if _, err := g.Put(context.Background(), client.File{Path: path}, strings.NewReader("old")); err != nil {
		t.Fatal(err)
	}
	_, err := g.Put(context.Background(), client.File{Path: path}, io.LimitReader(&pattern{}, 8<<20))
	if !errors.Is(err, &client.Error{Code: proto.CodeNoSpace}) {
		t.Errorf("error %v, want no_space", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "old" {
		t.Errorf("file is %d bytes now, want the old one", len(b))
	}
	noTemporaries(t, small)
}

// Case B11: a put that is cut leaves nothing, whichever way it is cut.
func TestB11PutIsCut(t *testing.T) {
	g := start(t, agent.Config{})
	path := filepath.Join(g.dir, "file")
	t.Run("reader fails", func(t *testing.T) {
		r := io.MultiReader(io.LimitReader(&pattern{}, 1<<20), broken{})
		_, err := g.Put(context.Background(), client.File{Path: path}, r)
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("error %v, want the reader's", err)
		}
	})
	t.Run("context ends", func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		r, w := io.Pipe()
		defer w.Close()
		go func() {
			w.Write(make([]byte, 100_000))
			cancel()
		}()
		_, err := g.Put(ctx, client.File{Path: path}, r)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want the context's", err)
		}
	})
	t.Run("connection ends", func(t *testing.T) {
		var conn net.Conn
		c := client.New(client.Config{Dial: func(ctx context.Context) (net.Conn, error) {
			var err error
			conn, err = g.dial(ctx)
			return conn, err
		}})
		r, w := io.Pipe()
		defer w.Close()
		go func() {
			w.Write(make([]byte, 100_000))
			conn.Close()
		}()
		_, err := c.Put(context.Background(), client.File{Path: path}, r)
		var lost *client.ConnectionError
		if !errors.As(err, &lost) || !lost.Started {
			t.Errorf("error %v, want a connection error", err)
		}
	})
	eventually(t, "no file", func() bool { return len(temporaries(g.dir)) == 0 })
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is a file: %v", err)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestGetWriterFails(t *testing.T) {
	g := start(t, agent.Config{})
	path := filepath.Join(g.dir, "file")
	os.WriteFile(path, make([]byte, 4<<20), 0o600)
	if _, err := g.Get(context.Background(), path, failing{}); !errors.Is(err, io.ErrShortBuffer) {
		t.Errorf("error %v, want the Writer's", err)
	}
	if f, err := g.Get(context.Background(), "/proc/self/status", io.Discard); err != nil || f.Size == 0 {
		t.Errorf("a file that claims to be empty: %+v, %v", f, err)
	}
}

func TestPutOwner(t *testing.T) {
	testkit.RequireRoot(t)
	g := start(t, agent.Config{})
	path := filepath.Join(g.dir, "file")
	if _, err := g.Put(context.Background(), client.File{Path: path, Mode: 0o755 | fs.ModeSetuid, User: "12:34"}, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	f, err := g.Get(context.Background(), path, io.Discard)
	if err != nil || f.UID != 12 || f.GID != 34 || f.Mode != 0o755|fs.ModeSetuid {
		t.Errorf("got %+v, %v", f, err)
	}
}

func temporaries(dir string) []string {
	list, _ := filepath.Glob(filepath.Join(dir, ".forkvm-*"))
	return list
}

func noTemporaries(t *testing.T, dir string) {
	t.Helper()
	if list := temporaries(dir); len(list) > 0 {
		t.Errorf("left behind: %q", list)
	}
}
