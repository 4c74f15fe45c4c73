package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/agenttest"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

func (g *guest) detach(t testing.TB, id, script string) client.Detached {
	t.Helper()
	d, err := g.Detach(context.Background(), client.Command{Args: []string{"sh", "-c", script}, Dir: g.dir, OperationID: id})
	if err != nil {
		t.Fatalf("detach %q: %v", script, err)
	}
	return d
}

// attach returns what a command has written, and its end.
func (g *guest) attach(t testing.TB, id string) (client.Detached, *output) {
	t.Helper()
	o := &output{}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	d, err := g.Attach(ctx, id, client.Attachment{Stdout: &o.stdout, Stderr: &o.stderr})
	if err != nil {
		t.Fatalf("attach %s: %v", id, err)
	}
	return d, o
}

var unknown = &client.Error{Code: proto.CodeOperationUnknown}

func TestDetached(t *testing.T) {
	g := start(t, agent.Config{})
	d := g.detach(t, "", "echo out; echo err >&2; while [ ! -e go ]; do sleep 0.02; done; echo more; exit 3")
	if d.ID == "" || !d.Running || d.PID == 0 || d.Containment == "" || d.Args[0] != "sh" || d.Result != nil {
		t.Fatalf("got %+v", d)
	}
	eventually(t, "output", func() bool {
		var out strings.Builder
		now, err := g.Attach(context.Background(), d.ID, client.Attachment{Stdout: &out, Now: true})
		return err == nil && now.Running && out.String() == "out\n"
	})
	g.sh(t, "touch go")
	for range 2 { // while it runs or just after, and afterwards
		end, o := g.attach(t, d.ID)
		if end.Running || end.Result == nil || end.Result.ExitCode != 3 || o.stdout.String() != "out\nmore\n" || o.stderr.String() != "err\n" {
			t.Errorf("got %+v, output %q and %q", end, &o.stdout, &o.stderr)
		}
	}
	var rest strings.Builder
	if _, err := g.Attach(context.Background(), d.ID, client.Attachment{Stdout: &rest, StdoutFrom: 4}); err != nil || rest.String() != "more\n" {
		t.Errorf("from the fifth byte: %q, %v", rest.String(), err)
	}
	if list, err := g.Commands(context.Background()); err != nil || len(list) != 1 || list[0].ID != d.ID || list[0].Result.ExitCode != 3 {
		t.Errorf("list: %+v, %v", list, err)
	}
	if _, err := g.Attach(context.Background(), "nobody", client.Attachment{}); !errors.Is(err, unknown) {
		t.Errorf("error %v, want operation_unknown", err)
	}
	if _, err := g.Signal(context.Background(), "nobody", 15, false); !errors.Is(err, unknown) {
		t.Errorf("error %v, want operation_unknown", err)
	}
}

func TestDetachedRefusals(t *testing.T) {
	g := start(t, agent.Config{})
	d, err := g.Detach(context.Background(), client.Command{Args: []string{"no-such-command"}, OperationID: "a"})
	if err != nil || d.Running || d.Result == nil || d.Result.ExitCode != 127 || d.Result.Error.Code != proto.CodeCommandNotFound {
		t.Errorf("got %+v, %v", d, err)
	}
	// What never started may be tried again.
	g.detach(t, "a", "true")
	for name, cmd := range map[string]client.Command{
		"input":    {Args: []string{"cat"}, Stdin: strings.NewReader("")},
		"terminal": {Args: []string{"sh"}, Terminal: &client.TerminalSize{}},
	} {
		if _, err := g.Detach(context.Background(), cmd); !errors.Is(err, &client.Error{Code: proto.CodeInvalidRequest}) {
			t.Errorf("%s: error %v, want invalid_request", name, err)
		}
	}
	small := start(t, agent.Config{MaxOperations: 2})
	small.detach(t, "a", "sleep 300")
	small.detach(t, "b", "sleep 300")
	_, err = small.Detach(context.Background(), client.Command{Args: []string{"true"}, OperationID: "c"})
	var e *client.Error
	if !errors.As(err, &e) || e.Code != proto.CodeTooManyOperations || !e.Retryable {
		t.Errorf("third of two: error %v", err)
	}
}

// A request that is repeated, also at the same time, runs once, and each gets all
// of the output and the result.
func TestRepeatedRequestsRunOnce(t *testing.T) {
	g := start(t, agent.Config{})
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			r, o := g.run(t, client.Command{Args: []string{"sh", "-c", "echo x >>runs; sleep 0.2; echo done; exit 5"}, Dir: g.dir, OperationID: "once"})
			if r.ExitCode != 5 || o.stdout.String() != "done\n" || r.StdoutBytes != 5 {
				t.Errorf("got %+v, %q", r, &o.stdout)
			}
		})
	}
	all.Wait()
	if b, _ := os.ReadFile(filepath.Join(g.dir, "runs")); string(b) != "x\n" {
		t.Errorf("it ran more than once: %q", b)
	}
}

// cuttable is a guest whose connections a test can break.
type cuttable struct {
	*guest
	mu    sync.Mutex
	conns []net.Conn
}

func (c *cuttable) client() *client.Client {
	return client.New(client.Config{Dial: func(ctx context.Context) (net.Conn, error) {
		conn, err := c.dial(ctx)
		if err == nil {
			c.mu.Lock()
			c.conns = append(c.conns, conn)
			c.mu.Unlock()
		}
		return conn, err
	}})
}

func (c *cuttable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		conn.Close()
	}
	c.conns = nil
}

// After a broken connection the same call says what became of the command: it
// runs, with the output from its beginning on, or has ended.
func TestBrokenConnection(t *testing.T) {
	g := &cuttable{guest: start(t, agent.Config{})}
	c := g.client()
	cmd := client.Command{Args: []string{"sh", "-c", "echo x >>runs; echo first; while [ ! -e go ]; do sleep 0.02; done; echo last"}, Dir: g.dir, OperationID: "job"}
	attempt := func(after func()) (client.Result, string, error) {
		var out bytes.Buffer
		seen := make(chan struct{})
		cmd := cmd
		cmd.Stdout = writer(func(p []byte) (int, error) {
			if out.Len() == 0 {
				close(seen)
			}
			return out.Write(p)
		})
		p, err := c.Start(context.Background(), cmd)
		if err != nil {
			return client.Result{}, "", err
		}
		<-seen
		after()
		r, err := p.Wait()
		return r, out.String(), err
	}
	var lost *client.ConnectionError
	if _, out, err := attempt(g.cut); !errors.As(err, &lost) || !lost.Started || out != "first\n" {
		t.Fatalf("got %q, %v, want a broken connection of a command that runs", out, err)
	}
	if d, err := c.Attach(context.Background(), "job", client.Attachment{Now: true}); err != nil || !d.Running {
		t.Errorf("got %+v, %v, want that it runs", d, err)
	}
	for range 2 {
		if r, out, err := attempt(func() { g.sh(t, "touch go") }); err != nil || r.ExitCode != 0 || out != "first\nlast\n" {
			t.Errorf("got %+v, %q, %v", r, out, err)
		}
	}
	if b, _ := os.ReadFile(filepath.Join(g.dir, "runs")); string(b) != "x\n" {
		t.Errorf("it ran more than once: %q", b)
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// Half of its input is nothing that a command should go on with, not even for the
// moment until it is killed: one of many would be fast enough.
func TestBrokenInputKills(t *testing.T) {
	g := &cuttable{guest: start(t, agent.Config{})}
	var commands []*client.Process
	begin := func(id string) {
		in, w := io.Pipe()
		t.Cleanup(func() { w.Close() })
		n := strconv.Itoa(len(commands))
		p, err := g.client().Start(context.Background(), client.Command{Args: []string{"sh", "-c", "cat >got" + n + "; touch complete" + n}, Dir: g.dir, Stdin: in, OperationID: id})
		if err != nil {
			t.Fatal(err)
		}
		commands = append(commands, p)
		w.Write([]byte("half"))
		eventually(t, "arrival", func() bool { b, _ := os.ReadFile(filepath.Join(g.dir, "got"+n)); return string(b) == "half" })
	}
	ids := []string{"half-a", "half-b", "half-c", "half-d", "half-e"}
	for _, id := range ids {
		begin(id)
		begin("")
	}
	g.cut()
	for _, p := range commands {
		p.Wait()
	}
	for _, id := range ids {
		d, _ := g.attach(t, id)
		if d.Result.Signal != 9 || d.Result.Error == nil || d.Result.Error.Code != proto.CodeInputCut {
			t.Errorf("%s: got %+v (%v), want a kill for input_cut", id, d.Result, d.Result.Error)
		}
	}
	eventually(t, "end of all commands", func() bool {
		info, err := g.Ping(context.Background())
		return err == nil && info.Operations <= 1 // the ping is one
	})
	if done, _ := filepath.Glob(filepath.Join(g.dir, "complete*")); len(done) > 0 {
		t.Errorf("%d commands went on", len(done))
	}
	// Whole input is, whatever happens to the connection then.
	whole := "input=$(cat); touch whole; while [ ! -e go ]; do sleep 0.02; done; printf %s \"$input\""
	p, err := g.client().Start(context.Background(), client.Command{Args: []string{"sh", "-c", whole}, Dir: g.dir, Stdin: strings.NewReader("whole"), Stdout: io.Discard, OperationID: "whole"})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the input's end", func() bool {
		_, err := os.Stat(filepath.Join(g.dir, "whole"))
		return err == nil
	})
	g.cut()
	p.Wait()
	if err := os.WriteFile(filepath.Join(g.dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if d, o := g.attach(t, "whole"); d.Result.ExitCode != 0 || o.stdout.String() != "whole" {
		t.Errorf("got %+v, output %q", d.Result, &o.stdout)
	}
}

// What nobody reads is kept to a limit, the newest of it, and the rest is counted.
func TestDetachedOutputIsBounded(t *testing.T) {
	g := start(t, agent.Config{})
	const size = 3 << 20
	g.detach(t, "loud", fmt.Sprintf("yes | head -c %d; echo end", size-4))
	var out bytes.Buffer
	var d client.Detached
	eventually(t, "end", func() bool {
		d, _ = g.Attach(context.Background(), "loud", client.Attachment{Now: true})
		return !d.Running
	})
	d, err := g.Attach(context.Background(), "loud", client.Attachment{Stdout: &out})
	if err != nil || d.Result.StdoutBytes+d.Result.StdoutDropped != size || !d.Result.StdoutTruncated || d.Stdout.Bytes != size {
		t.Fatalf("got %+v, %v", d, err)
	}
	if kept := d.Stdout.Bytes - d.Stdout.From; kept > 1<<20 || kept < 1<<20-8<<10 || int64(out.Len()) != kept || d.Stdout.Lost != d.Stdout.From {
		t.Errorf("%d bytes kept, %d sent from %d on", kept, out.Len(), d.Stdout.Lost)
	}
	if !strings.HasSuffix(out.String(), "y\nend\n") {
		t.Errorf("ends with %q", out.String()[out.Len()-20:])
	}
	r, o := g.run(t, client.Command{Args: []string{"unused"}, OperationID: "loud"})
	if !r.StdoutTruncated || r.StdoutDropped != d.Stdout.Lost || r.StdoutBytes != int64(o.stdout.Len()) || o.stdout.Len() != out.Len() {
		t.Errorf("repeated: %+v", r)
	}
}

// While somebody reads, nothing is lost: a slow reader holds the command up.
func TestDetachedOutputIsWhole(t *testing.T) {
	g := start(t, agent.Config{})
	const size = 24 << 20
	sum, want := sha256.New(), sha256.New()
	source := io.LimitReader(rand.NewChaCha8([32]byte{1}), size)
	pauses := 0
	slow := writer(func(p []byte) (int, error) {
		if pauses++; pauses%50 == 0 {
			time.Sleep(time.Millisecond)
		}
		return sum.Write(p)
	})
	r, _ := g.run(t, client.Command{Args: []string{"cat"}, Stdin: io.TeeReader(source, want), Stdout: slow, OperationID: "whole"})
	if r.ExitCode != 0 || r.StdoutBytes != size || r.StdoutTruncated || !bytes.Equal(sum.Sum(nil), want.Sum(nil)) {
		t.Errorf("got %+v, or other bytes", r)
	}
}

// A reader that does not read holds up its command, and nobody else, until it is
// gone.
func TestDetachedReaderThatDoesNotRead(t *testing.T) {
	g := start(t, agent.Config{})
	g.detach(t, "loud", "yes")
	ctx, cancel := context.WithCancel(context.Background())
	unread, release := agenttest.NewUnread()
	defer release()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		g.Attach(ctx, "loud", client.Attachment{Stdout: unread})
	}()
	bytesOf := func() int64 {
		d, err := g.Attach(context.Background(), "loud", client.Attachment{Now: true})
		if err != nil {
			t.Fatal(err)
		}
		return d.Stdout.Bytes
	}
	eventually(t, "command that waits", func() bool {
		before := bytesOf()
		time.Sleep(50 * time.Millisecond)
		return unread.Count() > 0 && bytesOf() == before
	})
	if r, o := g.sh(t, "echo ok"); r.ExitCode != 0 || o.stdout.String() != "ok\n" {
		t.Errorf("got %+v, %q", r, &o.stdout)
	}
	before := bytesOf()
	cancel()
	eventually(t, "command that goes on", func() bool { return bytesOf() > before+4<<20 })
	g.Signal(context.Background(), "loud", 9, true)
	_ = gone // its Writer is released when the test ends
}

func TestSignalDetached(t *testing.T) {
	g := startContained(t)
	g.detach(t, "trap", `trap 'echo caught; exit 7' TERM; touch ready; while :; do sleep 0.02; done`)
	eventually(t, "trap", func() bool { _, err := os.Stat(filepath.Join(g.dir, "ready")); return err == nil })
	if d, err := g.Signal(context.Background(), "trap", int(syscall.SIGTERM), false); err != nil || d.ID != "trap" {
		t.Errorf("got %+v, %v", d, err)
	}
	if d, o := g.attach(t, "trap"); d.Result.ExitCode != 7 || o.stdout.String() != "caught\n" {
		t.Errorf("got %+v, %q", d.Result, &o.stdout)
	}
	g.detach(t, "tree", `setsid sleep 300 & echo $! >pid.tmp; mv pid.tmp pid; wait`)
	pid := filepath.Join(g.dir, "pid")
	eventually(t, "start", func() bool { _, err := os.Stat(pid); return err == nil })
	if _, err := g.Signal(context.Background(), "tree", int(syscall.SIGKILL), true); err != nil {
		t.Fatal(err)
	}
	if d, _ := g.attach(t, "tree"); d.Result.Signal != 9 {
		t.Errorf("got %+v", d.Result)
	}
	eventually(t, "end of a child in another session", func() bool { return !alive(t, pid) })
	d, err := g.Detach(context.Background(), client.Command{Args: []string{"sh", "-c", "setsid sleep 300 & wait"}, Timeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if d, _ := g.attach(t, d.ID); !d.Result.TimedOut || d.Result.ExitCode != 124 {
		t.Errorf("got %+v, want a timeout", d.Result)
	}
}

// Results are kept for the newest commands only, and an id that is not known any
// more still runs nothing.
func TestDetachedResultsAreBounded(t *testing.T) {
	g := start(t, agent.Config{})
	ctx := context.Background()
	running := g.detach(t, "running", "sleep 300")
	for i := range 260 {
		d, err := g.Detach(ctx, client.Command{Args: []string{"true"}, OperationID: fmt.Sprint(i)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.Attach(ctx, d.ID, client.Attachment{}); err != nil {
			t.Fatal(err)
		}
	}
	list, err := g.Commands(ctx)
	if err != nil || len(list) != 257 || list[0].ID != running.ID || list[1].ID != "4" || list[256].ID != "259" {
		t.Errorf("%d commands in the list, %v", len(list), err)
	}
	if _, err := g.Detach(ctx, client.Command{Args: []string{"touch", filepath.Join(g.dir, "x")}, OperationID: "0"}); !errors.Is(err, &client.Error{Code: proto.CodeOperationExists}) {
		t.Errorf("error %v, want operation_exists", err)
	}
	if _, err := os.Stat(filepath.Join(g.dir, "x")); err == nil {
		t.Error("it ran")
	}
}
