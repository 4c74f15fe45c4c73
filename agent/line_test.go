package agent_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

// dials has the connections that a client has made.
type dials struct {
	mu    sync.Mutex
	conns []net.Conn
}

// watched returns a client of the agent whose connections are noted.
func watched(g *guest) (*client.Client, *dials) {
	d := &dials{}
	return client.New(client.Config{Dial: func(ctx context.Context) (net.Conn, error) {
		c, err := g.dial(ctx)
		if err == nil {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.conns = append(d.conns, c)
		}
		return c, err
	}}), d
}

func (d *dials) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.conns)
}

// Questions follow each other on one connection, which is no operation while nothing is
// asked.
func TestLine(t *testing.T) {
	g := start(t, agent.Config{Version: "1.2.3", MaxOperations: 1})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, made := watched(g)
	line := c.Line()
	defer line.Close()
	var together sync.WaitGroup
	for range 20 {
		together.Go(func() {
			if info, err := line.Ping(ctx); err != nil || info.Version != "1.2.3" || info.Operations != 0 {
				t.Errorf("ping: %+v, %v", info, err)
			}
			if u, err := line.Usage(ctx); err != nil || u.Agent.Version != "1.2.3" || u.Agent.Operations != 0 {
				t.Errorf("usage: %+v, %v", u, err)
			}
		})
	}
	together.Wait()
	if n := made.count(); n != 1 {
		t.Errorf("%d connections for 40 questions", n)
	}
	eventually(t, "another operation beside a line at rest", func() bool {
		_, err := g.Ping(ctx)
		return err == nil
	})
	g.agent.WaitIdle(time.Minute) // does not wait for the line
	if ctx.Err() != nil {
		t.Error("a line at rest keeps the agent from being idle")
	}

	// With as many operations as there may be the agent refuses a question on a line too.
	held, release := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { g.Exec(held, client.Command{Args: []string{"sleep", "300"}}) })
	busy := &client.Error{Code: proto.CodeTooManyOperations}
	eventually(t, "refusal", func() bool {
		_, err := line.Ping(ctx)
		return errors.Is(err, busy)
	})
	release()
	running.Wait()
	eventually(t, "answer after it", func() bool {
		_, err := line.Ping(ctx)
		return err == nil
	})
}

// Of many lines some stay connected, and all are answered. They are no operations, however
// many there are.
func TestManyLines(t *testing.T) {
	const lines, rounds, stay = 300, 3, 64
	g := start(t, agent.Config{MaxOperations: 2})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, made := watched(g)
	all := make([]*client.Line, lines)
	for i := range all {
		all[i] = c.Line()
		defer all[i].Close()
	}
	refused := 0
	for round := range rounds {
		for i, line := range all {
			// The one before may not rest yet.
			eventually(t, "answer", func() bool {
				_, err := line.Ping(ctx)
				if err != nil && !errors.Is(err, &client.Error{Code: proto.CodeTooManyOperations}) {
					t.Fatalf("line %d, round %d: %v", i, round, err)
				}
				if err != nil {
					refused++
				}
				return err == nil
			})
		}
	}
	// About as many as may stay have asked each time over one connection, the others over one each time: a line that rests again
	// may find that another one has come before it.
	if n, want := made.count()-refused, stay+rounds*(lines-stay); n < want-stay || n > want+stay {
		t.Errorf("%d connections and %d that were refused, want about %d", n, refused, want)
	}
	g.agent.WaitIdle(time.Minute)
	if _, err := g.Ping(ctx); err != nil || ctx.Err() != nil {
		t.Errorf("beside lines at rest: %v", err)
	}
}

// A connection that has ended, for whatever reason, is made anew.
func TestLineConnectsAnew(t *testing.T) {
	g := start(t, agent.Config{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, made := watched(g)
	line := c.Line()
	defer line.Close()
	for i, end := range []func(){
		func() {},
		func() { made.conns[0].Close() },
		func() { line.Close() },
		func() {
			gone, cancel := context.WithCancel(ctx)
			cancel()
			if _, err := line.Ping(gone); err == nil {
				t.Error("an answer after the caller had gone")
			}
		},
	} {
		end()
		if _, err := line.Ping(ctx); err != nil {
			t.Errorf("question %d: %v", i, err)
		}
		if _, err := line.Ping(ctx); err != nil || made.count() != i+1 {
			t.Errorf("question %d, repeated: %v; %d connections", i, err, made.count())
		}
	}
}

// Operations of all kinds follow each other on one connection, whatever streams they have;
// those that cannot have connections of their own.
func TestKeeping(t *testing.T) {
	g := start(t, agent.Config{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	plain, made := watched(g)
	c := plain.Keeping()
	defer c.Close()
	echo := func(in io.Reader, args ...string) {
		t.Helper()
		var out bytes.Buffer
		r, err := c.Exec(ctx, client.Command{Args: args, Stdin: in, Stdout: &out, Stderr: io.Discard})
		if err != nil || r.ExitCode != 0 || out.String() != "said" {
			t.Fatalf("%v: %+v, %v, %q", args, r, err, out.String())
		}
	}
	content := strings.Repeat("0123456789abcdef", 64<<10) // more than a window
	path := filepath.Join(g.dir, "file")
	for range 3 {
		echo(nil, "printf", "said")
		if _, err := c.Put(ctx, client.File{Path: path}, strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
		var got, tree bytes.Buffer
		if _, err := c.Get(ctx, path, &got); err != nil || got.String() != content {
			t.Fatalf("get: %d bytes, %v", got.Len(), err)
		}
		if _, err := c.GetTree(ctx, g.dir, &tree); err != nil || tree.Len() <= len(content) {
			t.Fatalf("get tree: %d bytes, %v", tree.Len(), err)
		}
		if _, err := c.PlaceTree(ctx, client.Placement{Dir: filepath.Join(g.dir, "copy"), Replace: true}, &tree); err != nil {
			t.Fatal(err)
		}
		if s, err := c.Survey(ctx, client.Look{Files: []string{path}}); err != nil || len(s.Files) != 1 {
			t.Fatalf("survey: %+v, %v", s, err)
		}
		if _, err := c.Ping(ctx); err != nil {
			t.Fatal(err)
		}
		if err := c.Remove(ctx, filepath.Join(g.dir, "copy"), true); err != nil {
			t.Fatal(err)
		}
	}
	if n := made.count(); n != 1 {
		t.Errorf("%d connections for operations one behind the other", n)
	}
	echo(strings.NewReader("said"), "cat")
	if d, err := c.Detach(ctx, client.Command{Args: []string{"true"}}); err != nil {
		t.Errorf("detach: %+v, %v", d, err)
	}
	made.mu.Lock()
	before := len(made.conns)
	made.mu.Unlock()
	if before > 3 {
		t.Errorf("%d connections", before)
	}
	// An operation that failed, or whose caller has gone, ends its connection.
	if _, err := c.Get(ctx, filepath.Join(g.dir, "nothing"), io.Discard); err == nil {
		t.Error("got what is not there")
	}
	echo(nil, "printf", "said")
	gone, leave := context.WithCancel(ctx)
	timer := time.AfterFunc(50*time.Millisecond, leave)
	defer timer.Stop()
	if _, err := c.Exec(gone, client.Command{Args: []string{"sleep", "300"}}); err == nil {
		t.Error("a command whose caller had gone went on")
	}
	failing := &failingWriter{}
	if _, err := c.Get(ctx, path, failing); !errors.Is(err, errFull) {
		t.Errorf("get into what takes no more: %v", err)
	}
	var both sync.WaitGroup
	for range 4 {
		both.Go(func() { echo(nil, "printf", "said") })
	}
	both.Wait()
	echo(nil, "printf", "said")
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	echo(nil, "printf", "said")
	g.agent.WaitIdle(time.Minute)
	if ctx.Err() != nil {
		t.Error("a connection at rest keeps the agent from being idle")
	}
}

var errFull = errors.New("full")

type failingWriter struct{}

func (*failingWriter) Write([]byte) (int, error) { return 0, errFull }

// What can have no sequel is the last operation of its connection, whatever is asked for,
// and so is one that failed. While an operation runs there is no other request.
func TestWhatIsAskedAgain(t *testing.T) {
	g := start(t, agent.Config{})
	ping, _ := proto.AppendJSON(nil, proto.TypeRequest, proto.Request{Op: proto.OpPing, Again: true})
	first := request(proto.Request{Op: proto.OpPing, Again: true})
	hello, started, result, refusal := proto.TypeHello, proto.TypeStarted, proto.TypeResult, proto.TypeError
	for name, tt := range map[string]struct {
		frames []byte
		want   []proto.Type
		code   string
	}{
		"questions":      {slices.Concat(first, ping, ping), []proto.Type{hello, result, result, result}, ""},
		"not wanted":     {slices.Concat(request(proto.Request{Op: proto.OpPing}), ping), []proto.Type{hello, result}, ""},
		"a sequel":       {slices.Concat(request(proto.Request{Op: proto.OpList, Again: true, Params: []byte(`{"path":"/"}`)}), ping), []proto.Type{hello, result, result}, ""},
		"under way":      {slices.Concat(request(proto.Request{Op: proto.OpExec, Again: true, Params: []byte(`{"args":["sleep","300"],"stdout":"discard","stderr":"discard"}`)}), ping), []proto.Type{hello, started, refusal}, proto.CodeProtocol},
		"no request":     {slices.Concat(first, proto.AppendCredit(nil, proto.Stdout, 1, 0), ping), []proto.Type{hello, result, refusal}, proto.CodeProtocol},
		"unknown frame":  {slices.Concat(first, proto.Append(nil, 0x55, 0, 0, nil)), []proto.Type{hello, result, refusal}, proto.CodeProtocol},
		"failed":         {slices.Concat(request(proto.Request{Op: proto.OpStat, Again: true, Params: []byte(`{"path":"/nowhere"}`)}), ping), []proto.Type{hello, refusal}, proto.CodeFileNotFound},
		"cut":            {slices.Concat(first, ping[:len(ping)-3]), []proto.Type{hello, result, refusal}, proto.CodeIO},
		"hung up behind": {first, []proto.Type{hello, result}, ""},
	} {
		types, failed := talk(t, g, bytes.Clone(tt.frames))
		if !slices.Equal(types, tt.want) || failed == nil != (tt.code == "") || failed != nil && failed.Code != tt.code {
			t.Errorf("%s: got frames %v, error %v, want %v, %q", name, types, failed, tt.want, tt.code)
		}
	}
}
