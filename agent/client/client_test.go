package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// scripted returns a client whose guest agent sends the given bytes, reads
// whatever comes, and hangs up.
func scripted(frames []byte) *client.Client {
	return client.New(client.Config{Dial: func(context.Context) (net.Conn, error) { return dialScripted(frames), nil }})
}

func dialScripted(frames []byte) net.Conn {
	host, guest := net.Pipe()
	go io.Copy(io.Discard, guest)
	go func() {
		guest.Write(frames)
		guest.Close()
	}()
	return host
}

func hello(v proto.Hello) []byte {
	b, _ := proto.AppendJSON(nil, proto.TypeHello, v)
	return b
}

var ours = hello(proto.Hello{Protocol: proto.Name, Min: 1, Max: 1, Speaks: 1})

func with(t proto.Type, payload string) []byte {
	return proto.Append(append([]byte{}, ours...), t, 0, 0, []byte(payload))
}

// A guest is hostile: whatever it answers is an error or a result, soon.
func TestStrangeAnswers(t *testing.T) {
	newer := hello(proto.Hello{Protocol: proto.Name, Min: 7, Max: 9})
	tests := []struct {
		name    string
		frames  []byte
		started bool
		want    string
	}{
		{"nothing", nil, false, "EOF"},
		{"SSH", []byte("SSH-2.0-OpenSSH_9.2\r\n"), false, "guest agent protocol"},
		{"newer agent", newer, false, "versions 7 to 9"},
		{"hangs up after hello", ours, false, "EOF"},
		{"refuses", with(proto.TypeError, `{"code":"busy","message":"come back","retryable":true}`), false, "come back (busy)"},
		{"refuses without JSON", with(proto.TypeError, `{`), false, "error frame"},
		{"hangs up while it runs", with(proto.TypeStarted, `{"pid":3}`), true, "lost while it ran"},
		{"cut in a frame", with(proto.TypeStarted, `{"pid":3}`)[:len(ours)+10], false, "unexpected EOF"},
		{"result no JSON", with(proto.TypeResult, `[]`), false, "result frame"},
		{"data for nobody", proto.Append(append([]byte{}, ours...), proto.TypeData, 0, 9, []byte("x")), false, "stream 9"},
		{"data beyond credit", floods(), false, "were granted"},
		{"endless credit", append(proto.AppendCredit(append([]byte{}, ours...), proto.Stdin, proto.MaxCredit, 0), proto.AppendCredit(nil, proto.Stdin, 1, 0)...), false, "credit above"},
		{"request", with(proto.TypeRequest, `{}`), false, "request frame from the guest"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			stuck, release := blocked()
			defer release()
			_, err := scripted(tt.frames).Exec(ctx, client.Command{Args: []string{"true"}, Stdout: stuck, Stdin: strings.NewReader("")})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error %v, want one with %q", err, tt.want)
			}
			var lost *client.ConnectionError
			if errors.As(err, &lost) && lost.Started != tt.started {
				t.Errorf("started is %v in %v", lost.Started, err)
			}
		})
	}
}

func floods() []byte {
	b := append([]byte{}, ours...)
	for range 20 {
		b = proto.Append(b, proto.TypeData, 0, proto.Stdout, make([]byte, proto.MaxData))
	}
	return b
}

// blocked returns a Writer that takes its first Write and keeps it until the
// connection is long over.
func blocked() (io.Writer, func()) {
	c := make(chan struct{})
	time.AfterFunc(200*time.Millisecond, func() { close(c) })
	return writerFunc(func(p []byte) (int, error) { <-c; return len(p), nil }), func() { <-c }
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestContextEndsAConnectionThatSaysNothing(t *testing.T) {
	silent := client.New(client.Config{Dial: func(context.Context) (net.Conn, error) {
		host, guest := net.Pipe()
		go func() {
			io.Copy(io.Discard, guest)
			guest.Close()
		}()
		return host, nil
	}})
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	for name, call := range map[string]func() error{
		"ping":  func() error { _, err := silent.Ping(ctx); return err },
		"ready": func() error { _, err := silent.WaitReady(ctx); return err },
		"renewed": func() error {
			_, err := silent.WaitRenewed(ctx, client.Identity{Generation: "g"})
			return err
		},
		"get": func() error { _, err := silent.Get(ctx, "/x", io.Discard); return err },
		"put": func() error { _, err := silent.Put(ctx, client.File{Path: "/x"}, strings.NewReader("x")); return err },
	} {
		if err := call(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: error %v, want the context's", name, err)
		}
	}
}

// A guest agent of a time before detached commands runs one with an OperationID as
// it can, and one that is to be left running not at all.
func TestOlderAgent(t *testing.T) {
	var requests []string
	c := client.New(client.Config{Dial: func(context.Context) (net.Conn, error) {
		host, guest := net.Pipe()
		go func() {
			defer guest.Close()
			b := make([]byte, 4096)
			n, err := guest.Read(b)
			for err == nil && !strings.Contains(string(b[:n]), `"op"`) {
				n, err = guest.Read(b)
			}
			requests = append(requests, string(b[:n]))
			answer, _ := proto.AppendJSON(nil, proto.TypeResult, proto.ExecResult{ExitCode: 3})
			if strings.Contains(requests[len(requests)-1], `"requires":["detach"]`) {
				answer, _ = proto.AppendJSON(nil, proto.TypeError, proto.Error{Code: proto.CodeUnsupported})
			}
			guest.Write(append(append([]byte{}, ours...), answer...))
			io.Copy(io.Discard, guest)
		}()
		return host, nil
	}})
	cmd := client.Command{Args: []string{"true"}, OperationID: "id"}
	if r, err := c.Exec(context.Background(), cmd); err != nil || r.ExitCode != 3 {
		t.Errorf("got %+v, %v", r, err)
	}
	if len(requests) != 2 || !strings.Contains(requests[1], `"operation_id":"id"`) {
		t.Errorf("requests %q, want the second with the id", requests)
	}
	if _, err := c.Detach(context.Background(), cmd); !errors.Is(err, &client.Error{Code: proto.CodeUnsupported}) {
		t.Errorf("error %v, want unsupported", err)
	}
}

// A guest that lists commands for ever, or says that one has ended without a result,
// is found out.
func TestStrangeCommands(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var broken *proto.ProtocolError
	endless := scripted(with(proto.TypeResult, `{"commands":[{"id":"a","number":0}],"more":true}`))
	if _, err := endless.Commands(ctx); !errors.As(err, &broken) {
		t.Errorf("endless list: %v", err)
	}
	if d, err := scripted(with(proto.TypeResult, `{"id":"a","state":"ended"}`)).Attach(ctx, "a", client.Attachment{}); !errors.As(err, &broken) {
		t.Errorf("end without a result: %+v, %v", d, err)
	}
}

// A guest that lists files for ever, or names that no file can have, is found out.
func TestStrangeFiles(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for name, entries := range map[string]string{
		"the same again": `{"name":"a"}`,
		"no order":       `{"name":"b"},{"name":"a"}`,
		"way up":         `{"name":".."}`,
		"elsewhere":      `{"name":"a/b"}`,
		"too long":       `{"name":"` + strings.Repeat("n", 256) + `"}`,
	} {
		var broken *proto.ProtocolError
		if files, err := scripted(with(proto.TypeResult, `{"entries":[`+entries+`],"more":true}`)).List(ctx, "/"); !errors.As(err, &broken) {
			t.Errorf("%s: %d files, %v", name, len(files), err)
		}
	}
	var asked int
	endless := client.New(client.Config{Dial: func(context.Context) (net.Conn, error) {
		var entries []string
		for range 5000 {
			asked++
			entries = append(entries, fmt.Sprintf(`{"name":"%09d"}`, asked))
		}
		return dialScripted(with(proto.TypeResult, `{"entries":[`+strings.Join(entries, ",")+`],"more":true}`)), nil
	}})
	if files, err := endless.List(ctx, "/"); err == nil || !strings.Contains(err.Error(), "more than") || asked > 600_000 {
		t.Errorf("%d files of %d, %v", len(files), asked, err)
	}
}

func TestUnreachable(t *testing.T) {
	refused := errors.New("connection refused")
	c := client.New(client.Config{Dial: func(context.Context) (net.Conn, error) { return nil, refused }})
	_, err := c.Exec(context.Background(), client.Command{Args: []string{"true"}})
	var lost *client.ConnectionError
	if !errors.Is(err, refused) || !errors.As(err, &lost) || lost.Started || lost.Op != proto.OpExec {
		t.Errorf("error %v, want a connection error with its cause", err)
	}
}

// FuzzAnswers reads hostile bytes as a guest agent would send them.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte("SSH-2.0-OpenSSH_9.2\r\n"))
	f.Add(with(proto.TypeResult, `{"exit_code":3,"items":{"generation":{"status":"done"}}}`))
	f.Add(proto.AppendCredit(append([]byte{}, ours...), proto.Stdin, 100, 0))
	f.Add(proto.Append(append([]byte{}, ours...), proto.TypeData, proto.FlagEnd, proto.Stdout, []byte("x")))
	f.Fuzz(func(t *testing.T, b []byte) {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		c := scripted(b)
		c.Exec(ctx, client.Command{Args: []string{"true"}, Stdin: strings.NewReader("input"), Stdout: io.Discard, Stderr: io.Discard})
		c.Get(ctx, "/x", io.Discard)
		c.Put(ctx, client.File{Path: "/x"}, strings.NewReader("input"))
		c.Detach(ctx, client.Command{Args: []string{"true"}})
		c.Attach(ctx, "id", client.Attachment{Stdout: io.Discard})
		c.Signal(ctx, "id", 9, true)
		c.Commands(ctx)
		c.List(ctx, "/x")
		c.Usage(ctx)
		if conn, err := c.Dial(ctx, "tcp", ":1"); err == nil {
			io.WriteString(conn, "input")
			conn.Close()
		}
		c.Renew(ctx, client.Identity{Generation: "g", BootID: true})
		if ctx.Err() != nil {
			t.Fatal("an answer that ended kept the client waiting")
		}
	})
}

// An older guest agent ends each connection behind its first answer, and is asked over
// a new one.
func TestLineToAnOlderAgent(t *testing.T) {
	dialed := 0
	c := client.New(client.Config{Dial: func(context.Context) (net.Conn, error) {
		dialed++
		return dialScripted(with(proto.TypeResult, `{"version":"old"}`)), nil
	}})
	line := c.Line()
	defer line.Close()
	for i := range 3 {
		if info, err := line.Ping(context.Background()); err != nil || info.Version != "old" || dialed != i+1 {
			t.Errorf("%+v, %v, after %d connections", info, err, dialed)
		}
	}
}
