package agent_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

// talk sends frames to an agent and returns the frames that it answers with
// until it closes the connection.
func talk(t testing.TB, g *guest, frames []byte) (types []proto.Type, failure *proto.Error) {
	t.Helper()
	conn, err := g.dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	conn.Write(frames)
	conn.(*net.UnixConn).CloseWrite()
	c := proto.NewConn(conn)
	for {
		h, err := c.Next()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Logf("end of connection: %v", err)
			}
			return types, failure
		}
		p, err := c.Payload(h, nil)
		if err != nil {
			t.Fatal(err)
		}
		types = append(types, h.Type)
		if h.Type == proto.TypeError {
			failure = new(proto.Error)
			if err := json.Unmarshal(p, failure); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func hello(speaks int) []byte {
	b, _ := proto.AppendJSON(nil, proto.TypeHello, proto.Hello{Protocol: proto.Name, Min: 1, Max: max(1, speaks), Speaks: speaks})
	return b
}

func request(r proto.Request) []byte {
	b, _ := proto.AppendJSON(hello(1), proto.TypeRequest, r)
	return b
}

func TestHandshake(t *testing.T) {
	g := start(t, agent.Config{})
	strange, _ := proto.AppendJSON(nil, proto.TypeHello, proto.Hello{Protocol: "other", Min: 1, Max: 1})
	tests := []struct {
		name   string
		frames []byte
		code   string
	}{
		{"HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), proto.CodeProtocol},
		{"other protocol", strange, proto.CodeProtocol},
		{"future version", hello(99), proto.CodeVersionUnsupported},
		{"request first", request(proto.Request{Op: "ping"})[len(hello(1)):], proto.CodeProtocol},
		{"hello twice", append(hello(1), hello(1)...), proto.CodeProtocol},
		{"request no JSON", proto.Append(hello(1), proto.TypeRequest, 0, 0, []byte("{")), proto.CodeProtocol},
		{"unknown operation", request(proto.Request{Op: "teleport"}), proto.CodeUnsupported},
		{"unknown feature", request(proto.Request{Op: "ping", Requires: []string{"pty"}}), proto.CodeUnsupported},
		{"wrong parameters", request(proto.Request{Op: "exec", Params: []byte(`{"args":7}`)}), proto.CodeInvalidRequest},
		{"no parameters", request(proto.Request{Op: "exec"}), proto.CodeInvalidRequest},
		{"long operation id", request(proto.Request{Op: "exec", OperationID: strings.Repeat("x", 129)}), proto.CodeInvalidRequest},
		{"output mode", request(proto.Request{Op: "exec", Params: []byte(`{"args":["true"],"stdout":"tape"}`)}), proto.CodeInvalidRequest},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			types, failure := talk(t, g, tt.frames)
			if failure == nil || failure.Code != tt.code || failure.Retryable || failure.Message == "" {
				t.Errorf("got frames %v, error %v, want %s", types, failure, tt.code)
			}
		})
	}
}

// An answer that is there at once comes with the agent's hello; a host that waits for
// the hello before it asks gets it all the same, and so does one that asks for
// something that takes its time.
func TestHelloAndAnswer(t *testing.T) {
	g := start(t, agent.Config{})
	conn, err := g.dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(30 * time.Second))
	frames := func() (types []proto.Type) {
		b := make([]byte, 4096)
		n, err := conn.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		for c := proto.NewConn(bytes.NewBuffer(b[:n])); ; {
			h, err := c.Next()
			if err != nil {
				return types
			}
			c.Payload(h, nil)
			types = append(types, h.Type)
		}
	}
	conn.Write(request(proto.Request{Op: proto.OpPing}))
	if got := frames(); !slices.Equal(got, []proto.Type{proto.TypeHello, proto.TypeResult}) {
		t.Errorf("ping: the first that comes is %v", got)
	}
	conn.Close()

	for name, parts := range map[string][][]byte{
		"hello first": {hello(1), request(proto.Request{Op: proto.OpPing})[len(hello(1)):]},
		"slow answer": {request(proto.Request{Op: proto.OpExec, Params: []byte(`{"args":["sleep","300"]}`)})},
	} {
		if conn, err = g.dial(context.Background()); err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(30 * time.Second))
		for i, part := range parts {
			conn.Write(part)
			if got := frames(); len(got) == 0 || i == 0 && got[0] != proto.TypeHello {
				t.Errorf("%s: got %v for part %d", name, got, i)
			}
		}
		conn.Close()
	}
}

// A host of the future may say more than this agent understands.
func TestForwardCompatibility(t *testing.T) {
	g := start(t, agent.Config{})
	b := proto.Append(nil, 0x90, 0xff, 7, []byte("an optional frame"))
	b = proto.Append(b, proto.TypeHello, 0xf0, 0, []byte(`{"protocol":"forkvm-guest-agent","min":1,"max":4,"speaks":1,"colour":"red"}`))
	b = proto.Append(b, proto.TypeRequest, 0, 0, []byte(`{"op":"ping","priority":3,"params":{"deep":true}}`))
	types, failure := talk(t, g, b)
	if failure != nil || len(types) != 2 || types[1] != proto.TypeResult {
		t.Errorf("got frames %v, error %v", types, failure)
	}
}

// What a host must not do while a command runs ends that command only.
func TestViolationsWhileACommandRuns(t *testing.T) {
	g := start(t, agent.Config{})
	sleep := request(proto.Request{Op: "exec", Params: []byte(`{"args":["sleep","300"],"stdin":true}`)})
	for name, frame := range map[string][]byte{
		// More than the queue and the pipe behind it hold together.
		"data beyond credit":   bytes.Repeat(proto.Append(nil, proto.TypeData, 0, proto.Stdin, make([]byte, 60_000)), 3),
		"data on stdout":       proto.Append(nil, proto.TypeData, 0, proto.Stdout, []byte("x")),
		"data after the end":   proto.Append(proto.Append(nil, proto.TypeData, proto.FlagEnd, proto.Stdin, nil), proto.TypeData, 0, proto.Stdin, []byte("x")),
		"too much credit":      proto.AppendCredit(proto.AppendCredit(nil, proto.Stdout, proto.MaxCredit, 0), proto.Stdout, 1, 0),
		"second request":       proto.Append(nil, proto.TypeRequest, 0, 0, []byte("{}")),
		"unknown frame":        proto.Append(nil, 0x55, 0, 0, nil),
		"control without JSON": proto.Append(nil, proto.TypeControl, 0, 0, []byte("x")),
	} {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			types, failure := talk(t, g, append(append([]byte{}, sleep...), frame...))
			if failure == nil || failure.Code != proto.CodeProtocol || time.Since(begin) > 20*time.Second {
				t.Errorf("got frames %v, error %v after %v", types, failure, time.Since(begin))
			}
		})
	}
	eventually(t, "end of all operations", func() bool {
		info, err := g.Ping(context.Background())
		return err == nil && info.Operations == 0
	})
}

func TestWaitReady(t *testing.T) {
	g := start(t, agent.Config{Version: "1.2.3"})
	attempts := 0
	c := client.New(client.Config{Dial: func(ctx context.Context) (net.Conn, error) {
		if attempts++; attempts < 4 {
			return nil, errors.New("connection refused")
		}
		return g.dial(ctx)
	}})
	info, err := c.WaitReady(context.Background())
	if err != nil || info.Version != "1.2.3" || info.Uptime <= 0 || attempts != 4 {
		t.Errorf("got %+v, %v after %d attempts", info, err, attempts)
	}
}

// FuzzSession sends hostile bytes as a host. Requests cannot run anything: the
// fuzzer's frames come after a ping.
func FuzzSession(f *testing.F) {
	l, err := net.Listen("unix", f.TempDir()+"/s")
	if err != nil {
		f.Fatal(err)
	}
	a, err := agent.New(agent.Config{})
	if err != nil {
		f.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go a.Serve(ctx, l)
	f.Cleanup(func() { cancel(); a.Close() })
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add(hello(1))
	f.Add(request(proto.Request{Op: "ping"}))
	f.Add(append(request(proto.Request{Op: "ping", Again: true}), request(proto.Request{Op: "usage"})[len(hello(1)):]...))
	f.Add(request(proto.Request{Op: "get", Params: []byte(`{"path":"/etc/hostname"}`)}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if strings.Contains(string(b), "ex") || strings.Contains(string(b), "pu") || strings.Contains(string(b), "conn") || strings.Contains(string(b), `\u`) {
			t.Skip("could run something")
		}
		conn, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		conn.Write(b)
		conn.(*net.UnixConn).CloseWrite()
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, context.DeadlineExceeded) {
			t.Fatal("the agent keeps a finished connection")
		}
		c := client.New(client.Config{Dial: dialer(l.Addr().String())})
		if _, err := c.Ping(context.Background()); err != nil {
			t.Fatal(err)
		}
	})
}
