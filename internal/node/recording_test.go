package node

import (
	"bytes"
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/process"
)

// recordedVM is a VM whose process is this test's and whose guest agent answers
// what the test says.
func recordedVM(t *testing.T, n *Node, name string, recording Recording, answer func(*proto.Conn, proto.Request)) *VM {
	t.Helper()
	d, err := n.newDraft(name)
	if err != nil {
		t.Fatal(err)
	}
	p := running(t)
	d.record.PID, d.record.Started = p.PID(), p.Start()
	d.record.Identity.Generation = "g1"
	if err := d.beginRecord(Options{Recording: recording}, journal.Created{Image: "debian"}); err != nil {
		t.Fatal(err)
	}
	vm, err := d.finish(&process.Started{Ready: time.Millisecond}, nil)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", vm.VsockPath())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go converse(c, answer)
		}
	}()
	return vm
}

// converse is one connection of a guest agent.
func converse(c net.Conn, answer func(*proto.Conn, proto.Request)) {
	defer c.Close()
	line := make([]byte, len("CONNECT 1024\n"))
	if _, err := io.ReadFull(c, line); err != nil {
		return
	}
	io.WriteString(c, "OK 1\n")
	wire := proto.NewConn(c)
	wire.WriteJSON(proto.TypeHello, proto.Hello{Protocol: proto.Name, Min: 1, Max: 1, Speaks: 1})
	for {
		h, err := wire.Next()
		if err != nil {
			return
		}
		if h.Type != proto.TypeRequest {
			if _, err := wire.Payload(h, nil); err != nil {
				return
			}
			continue
		}
		var r proto.Request
		if wire.JSON(h, &r) != nil {
			return
		}
		answer(wire, r)
		io.Copy(io.Discard, c)
		return
	}
}

// says writes two streams and a result.
func says(w *proto.Conn, _ proto.Request) {
	w.WriteJSON(proto.TypeStarted, proto.Started{PID: 7})
	for stream, text := range map[uint16]string{proto.Stdout: "3 passed\n", proto.Stderr: strings.Repeat("e", 5000)} {
		b := append(make([]byte, proto.HeaderSize), text...)
		w.WriteData(stream, proto.FlagEnd, b)
	}
	w.WriteJSON(proto.TypeResult, proto.ExecResult{ExitCode: 2, DurationMS: 40})
}

func linesOf(t *testing.T, n *Node, ref string) []*journal.Line {
	t.Helper()
	r, err := n.FindRollout(ref)
	if err != nil {
		t.Fatal(err)
	}
	f, err := r.Journal()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var lines []*journal.Line
	for {
		l, err := f.Next()
		if err == io.EOF {
			return lines
		}
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
}

func decode[T any](t *testing.T, l *journal.Line) (data T) {
	t.Helper()
	if err := l.Decode(&data); err != nil {
		t.Fatal(err)
	}
	return data
}

func events(lines []*journal.Line) (all []string) {
	for _, l := range lines {
		all = append(all, l.Event)
	}
	return all
}

func TestCommandIsOnRecord(t *testing.T) {
	n := open(t)
	vm := recordedVM(t, n, "attempt", RecordJournal, says)
	var out, errs bytes.Buffer
	result, err := vm.Agent().Exec(t.Context(), client.Command{
		Args: []string{"make", "test"}, Env: []string{"TOKEN=secret"}, Dir: "/srv", User: "dev", Timeout: time.Second,
		Stdout: &out, Stderr: &errs,
	})
	if err != nil || result.ExitCode != 2 || out.String() != "3 passed\n" {
		t.Fatalf("%+v, %q: %v", result, &out, err)
	}
	lines := linesOf(t, n, "attempt")
	if got := events(lines); !reflect.DeepEqual(got, []string{"created", "exec", "done"}) {
		t.Fatalf("events %v", got)
	}
	if c := decode[journal.Created](t, lines[0]); c.VM != vm.ID || c.Name != "attempt" || c.Image != "debian" || c.Generation != "g1" {
		t.Errorf("created: %+v", c)
	}
	op := decode[journal.Operation](t, lines[1])
	want := journal.Operation{Args: []proto.Text{"make", "test"}, Env: []proto.Text{"TOKEN"}, Dir: "/srv", User: "dev", TimeoutMS: 1000}
	if !reflect.DeepEqual(op, want) {
		t.Errorf("got %+v, want %+v", op, want)
	}
	for _, l := range lines {
		if strings.Contains(string(l.Data), "secret") {
			t.Errorf("a value of the environment is on record: %s", l.Data)
		}
	}
	done := decode[journal.Done](t, lines[2])
	if done.Of != 2 || done.Result.ExitCode != 2 || done.Result.DurationMS != 40 || done.Stdout.Text != "3 passed\n" || done.Stderr.Bytes != 5000 || done.Error != "" {
		t.Errorf("done: %+v %+v %+v", done, done.Stdout, done.Stderr)
	}
	kept, err := n.rollout(vm.ID).Kept(done.Stderr)
	if err != nil || string(kept) != errs.String() {
		t.Errorf("kept %d bytes: %v", len(kept), err)
	}
}

// A connection that breaks leaves a line that says so, behind the one that says
// what was asked.
func TestBrokenCommandIsOnRecord(t *testing.T) {
	n := open(t)
	vm := recordedVM(t, n, "attempt", RecordJournal, func(w *proto.Conn, _ proto.Request) {
		w.WriteJSON(proto.TypeStarted, proto.Started{PID: 7})
		w.WriteJSON(proto.TypeError, proto.Error{Code: proto.CodeIO, Message: "broken"})
	})
	if _, err := vm.Agent().Exec(t.Context(), client.Command{Args: []string{"make"}}); err == nil {
		t.Fatal("no error")
	}
	lines := linesOf(t, n, "attempt")
	if got := events(lines); !reflect.DeepEqual(got, []string{"created", "exec", "done"}) {
		t.Fatalf("events %v", got)
	}
	if done := decode[journal.Done](t, lines[2]); done.Result != nil || !strings.Contains(done.Error, "broken") {
		t.Errorf("done: %+v", done)
	}
}

func TestFileChangesAreOnRecord(t *testing.T) {
	n := open(t)
	vm := recordedVM(t, n, "attempt", RecordJournal, func(w *proto.Conn, r proto.Request) {
		if r.Op != proto.OpPut {
			w.WriteJSON(proto.TypeResult, struct{}{})
			return
		}
		w.WriteCredit(proto.Stdin, 1<<20, 0)
		for {
			h, err := w.Next()
			if err != nil {
				return
			}
			w.Payload(h, nil)
			if h.Type == proto.TypeData && h.Flags&proto.FlagEnd != 0 {
				w.WriteJSON(proto.TypeResult, proto.FileResult{Bytes: 5})
				return
			}
		}
	})
	ctx, guest := t.Context(), vm.Agent()
	if _, err := guest.Put(ctx, client.File{Path: "/a\xff", Mode: 0o600}, strings.NewReader("hello")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(guest.Move(ctx, "/a", "/b"), guest.Remove(ctx, "/b", true)); err != nil {
		t.Fatal(err)
	}
	// Looking is not on record.
	if _, err := guest.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := guest.Stat(ctx, "/b"); err != nil {
		t.Fatal(err)
	}
	lines := linesOf(t, n, vm.ID[:4])
	if got := events(lines); !reflect.DeepEqual(got, []string{"created", "put", "done", "move", "done", "remove", "done"}) {
		t.Fatalf("events %v", got)
	}
	if op := decode[journal.Operation](t, lines[1]); op.Path != "/a\xff" || op.Mode != 0o600 {
		t.Errorf("put: %+v", op)
	}
	if done := decode[journal.Done](t, lines[2]); done.Of != 2 || done.Input.Text != "hello" {
		t.Errorf("put is done: %+v", done)
	}
	if op := decode[journal.Operation](t, lines[3]); op.Path != "/a" || op.To != "/b" {
		t.Errorf("move: %+v", op)
	}
}

// Nothing is done that cannot be put on record first.
func TestNothingWithoutItsLine(t *testing.T) {
	n := open(t)
	asked := make(chan string, 1)
	vm := recordedVM(t, n, "attempt", RecordJournal, func(_ *proto.Conn, r proto.Request) { asked <- r.Op })
	if err := os.Rename(n.rollout(vm.ID).dir, n.rollout(vm.ID).dir+".away"); err != nil {
		t.Fatal(err)
	}
	_, err := vm.Agent().Exec(t.Context(), client.Command{Args: []string{"make"}})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("exec: %v", err)
	}
	select {
	case op := <-asked:
		t.Errorf("the guest was asked: %s", op)
	default:
	}
}

func TestNoRecord(t *testing.T) {
	n := open(t)
	vm := recordedVM(t, n, "attempt", RecordNone, says)
	if _, err := vm.Agent().Exec(t.Context(), client.Command{Args: []string{"make"}, Stdout: new(bytes.Buffer), Stderr: new(bytes.Buffer)}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.FindRollout("attempt"); !failure.Is(err, failure.RolloutNotFound) {
		t.Errorf("find: %v", err)
	}
	if _, err := os.Stat(n.rollout(vm.ID).dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("directory: %v", err)
	}
}

// A rollout is read when its VM is gone; the last one that had a name is meant by it.
func TestRolloutOutlivesItsVM(t *testing.T) {
	n := open(t)
	first := recordedVM(t, n, "attempt", RecordJournal, says)
	if err := n.rollout(first.ID).Remove(); !failure.Is(err, failure.InvalidArgument) {
		t.Errorf("remove under a vm: %v", err)
	}
	if err := first.Remove(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if got := events(linesOf(t, n, "attempt")); !reflect.DeepEqual(got, []string{"created", "ended", "removed"}) {
		t.Errorf("events %v", got)
	}
	second := recordedVM(t, n, "attempt", RecordJournal, says)
	for _, gone := range []bool{false, true} {
		if gone {
			if err := second.Remove(t.Context(), true); err != nil {
				t.Fatal(err)
			}
		}
		if r, err := n.FindRollout("attempt"); err != nil || r.ID() != second.ID {
			t.Errorf("found %+v: %v", r, err)
		}
	}
	reward := 0.5
	r, err := n.FindRollout(first.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Note(journal.EventVerdict, journal.Verdict{Outcome: "scored", Reward: &reward}); err != nil {
		t.Fatal(err)
	}
	if all, err := n.Rollouts(); err != nil || len(all) != 2 {
		t.Fatalf("%d rollouts: %v", len(all), err)
	}
	if err := r.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := n.FindRollout(first.ID); !failure.Is(err, failure.RolloutNotFound) {
		t.Errorf("find what was removed: %v", err)
	}
}

// Of each operation of the guest agent it is decided whether it changes the guest. One
// of which it is not is taken for one that does.
func TestEveryOperationIsDecided(t *testing.T) {
	files, err := filepath.Glob("../../agent/proto/*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if op, ok := operationWord(n); ok {
				found++
				if looks[op] == journal.IsOperation(op) && op != proto.OpAttach {
					t.Errorf("%s: it is a look: %v, it is on record: %v", op, looks[op], journal.IsOperation(op))
				}
			}
			return true
		})
	}
	if found < 15 {
		t.Errorf("%d operations", found)
	}
}

// operationWord is the word of an operation, if that is what is declared.
func operationWord(n ast.Node) (string, bool) {
	spec, ok := n.(*ast.ValueSpec)
	if !ok || len(spec.Values) != 1 || !strings.HasPrefix(spec.Names[0].Name, "Op") {
		return "", false
	}
	literal, ok := spec.Values[0].(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return "", false
	}
	return strings.Trim(literal.Value, `"`), true
}

// A failed start leaves no record.
func TestFailedStartLeavesNoRecord(t *testing.T) {
	n := open(t)
	d, err := n.newDraft("attempt")
	if err != nil {
		t.Fatal(err)
	}
	if err := d.beginRecord(Options{Recording: RecordJournal}, journal.Created{}); err != nil {
		t.Fatal(err)
	}
	d.abandon()
	if left, _ := filepath.Glob(filepath.Join(n.rolloutsDir(), "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestStepNames(t *testing.T) {
	for name, want := range map[string]bool{
		"0123456789ab.7": true, "0123456789ab.07": false, "0123456789ab.": false, "0123456789ab": false,
		"0123456789AB.7": false, "step.7": false, "0123456789ab.7.8": false, "0123456789ab.-7": false,
	} {
		if IsStep(name) != want {
			t.Errorf("%q is a step: %v", name, !want)
		}
	}
	n := open(t)
	vm := recordedVM(t, n, "attempt", RecordJournal, says)
	if _, err := vm.Snapshot(context.Background(), "0123456789ab.7", ""); !failure.Is(err, failure.InvalidArgument) {
		t.Errorf("snapshot: %v", err)
	}
	for ref, code := range map[string]failure.Code{
		"attempt@x": failure.InvalidArgument, "attempt@0": failure.InvalidArgument, "attempt@2": failure.SnapshotNotFound,
		"attempt@1": failure.SnapshotNotFound, "other@2": failure.RolloutNotFound,
	} {
		if _, err := n.InspectSnapshot(ref); !failure.Is(err, code) {
			t.Errorf("%s: %v, want %s", ref, err, code)
		}
	}
}
