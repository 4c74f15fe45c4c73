package agent_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/testkit"
)

func TestFileErrors(t *testing.T) {
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

// A put that is cut leaves nothing, whichever way it is cut.
func TestPutIsCut(t *testing.T) {
	g := start(t, agent.Config{})
	path := filepath.Join(g.dir, "file")
	t.Run("reader fails", func(t *testing.T) {
		r := io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), broken{})
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
	t.Run("context ends before the reader does", func(t *testing.T) {
		for range 50 {
			ctx, cancel := context.WithCancel(context.Background())
			if _, err := g.Put(ctx, client.File{Path: path}, io.MultiReader(strings.NewReader("half"), endsAfter{cancel})); !errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want the context's", err)
			}
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

// endsAfter ends when it has called its function.
type endsAfter struct{ first func() }

func (e endsAfter) Read([]byte) (int, error) {
	e.first()
	return 0, io.EOF
}

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
