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
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

// program is one that listens in the guest and serves each connection.
func program(t *testing.T, network, address string, serve func(net.Conn)) net.Addr {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	t.Cleanup(func() { l.Close(); all.Wait() })
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { defer conn.Close(); serve(conn) })
		}
	})
	return l.Addr()
}

// answer reads to the end and answers with how much that was and its digest.
func answer(conn net.Conn) {
	sum := sha256.New()
	n, _ := io.Copy(sum, conn)
	fmt.Fprintf(conn, "%d %x", n, sum.Sum(nil))
}

// A half-closed connection goes on in the other direction, and no byte is lost.
func TestConnectKeepsHalfCloses(t *testing.T) {
	g := start(t, agent.Config{})
	tcp := program(t, "tcp", "127.0.0.1:0", answer)
	path := filepath.Join(g.dir, "program.sock")
	program(t, "unix", path, answer)
	tcp6 := program(t, "tcp", "[::1]:0", answer)
	for _, at := range []struct{ network, address string }{
		{"tcp", fmt.Sprintf(":%d", tcp.(*net.TCPAddr).Port)},
		{"tcp", tcp.String()},
		{"tcp", fmt.Sprintf(":%d", tcp6.(*net.TCPAddr).Port)},
		{"unix", path},
	} {
		ctx, cancel := context.WithCancel(context.Background())
		conn, err := g.Dial(ctx, at.network, at.address)
		cancel() // bounds the dialing only
		if err != nil {
			t.Errorf("%v: %v", at, err)
			continue
		}
		const size = 8 << 20
		sum := sha256.New()
		if _, err := io.Copy(io.MultiWriter(conn, sum), io.LimitReader(rand.NewChaCha8([32]byte{2}), size)); err != nil {
			t.Error(err)
		}
		conn.CloseWrite()
		got, err := io.ReadAll(conn)
		if want := fmt.Sprintf("%d %x", size, sum.Sum(nil)); err != nil || string(got) != want {
			t.Errorf("%v: got %q, %v, want %q", at, got, err, want)
		}
		conn.Close()
	}
	// The other way round: what was written before the close arrives, however late
	// it is read.
	late := program(t, "tcp", "127.0.0.1:0", func(conn net.Conn) { conn.Write(bytes.Repeat([]byte("x"), 3<<20)) })
	conn, err := g.Dial(context.Background(), "tcp", late.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	time.Sleep(100 * time.Millisecond)
	if got, err := io.ReadAll(conn); err != nil || len(got) != 3<<20 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestConnectRefusals(t *testing.T) {
	g := start(t, agent.Config{})
	for _, tt := range []struct{ network, address, code string }{
		{"tcp", ":1", proto.CodeConnectionRefused},
		{"unix", g.dir + "/nothing", proto.CodeFileNotFound},
		{"unix", "", proto.CodeInvalidRequest},
		{"tcp", "example.com:80", proto.CodeInvalidRequest},
		{"tcp", ":0", proto.CodeInvalidRequest},
		{"tcp", ":http", proto.CodeInvalidRequest},
		{"tcp", "80", proto.CodeInvalidRequest},
		{"udp", ":53", proto.CodeInvalidRequest},
	} {
		conn, err := g.Dial(context.Background(), tt.network, tt.address)
		if !errors.Is(err, &client.Error{Code: tt.code}) {
			t.Errorf("%v: got %v, %v", tt, conn, err)
		}
	}
}

// A connection that breaks on one side breaks on the other; it does not just end.
func TestConnectionsBreak(t *testing.T) {
	g := &cuttable{guest: start(t, agent.Config{})}
	reset := program(t, "tcp", "127.0.0.1:0", func(conn net.Conn) {
		io.ReadFull(conn, make([]byte, 1))
		conn.(*net.TCPConn).SetLinger(0)
	})
	conn, err := g.Dial(context.Background(), "tcp", reset.String())
	if err != nil {
		t.Fatal(err)
	}
	conn.Write([]byte("x"))
	if _, err := io.ReadAll(conn); !errors.Is(err, &client.Error{Code: proto.CodeConnectionReset}) {
		t.Errorf("the program resets it: error %v, want connection_reset", err)
	}
	conn.Close()

	ended := make(chan error, 1)
	waits := program(t, "tcp", "127.0.0.1:0", func(conn net.Conn) {
		_, err := io.ReadAll(conn)
		ended <- err
	})
	conn, err = g.client().Dial(context.Background(), "tcp", waits.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	g.cut() // as when the guest ends
	var lost *client.ConnectionError
	if _, err := io.ReadAll(conn); !errors.As(err, &lost) || !lost.Started {
		t.Errorf("the guest goes: error %v", err)
	}
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the host goes: the program's error is %v, want a reset", err)
	}
}

// forward serves a port of the host until the test ends.
func forward(t *testing.T, g *guest, network, address string) net.Addr {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- client.Forward(ctx, l, func(ctx context.Context, conn client.HalfConn) error {
			return g.Relay(ctx, conn, network, address)
		}, func(err error) { t.Log(err) })
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("forward: %v", err)
		}
	})
	return l.Addr()
}

func TestForward(t *testing.T) {
	g := start(t, agent.Config{})
	at := forward(t, g, "tcp", program(t, "tcp", "127.0.0.1:0", answer).String())
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			conn, err := net.Dial("tcp", at.String())
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			sent := strings.Repeat(fmt.Sprint(i), 10_000)
			io.WriteString(conn, sent)
			conn.(*net.TCPConn).CloseWrite()
			got, err := io.ReadAll(conn)
			if want := fmt.Sprintf("%d %x", len(sent), sha256.Sum256([]byte(sent))); err != nil || string(got) != want {
				t.Errorf("connection %d: got %q, %v", i, got, err)
			}
		})
	}
	all.Wait()
	eventually(t, "end of all operations", func() bool {
		info, err := g.Ping(context.Background())
		return err == nil && info.Operations == 0
	})
	// Nobody listens there: the connection is reset, not just ended.
	conn, err := net.Dial("tcp", forward(t, g, "tcp", ":1").String())
	if err == nil {
		_, err = io.ReadAll(conn)
		conn.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("error %v, want a reset", err)
	}
	// One that nobody reads ends with the forwarding all the same.
	flood := forward(t, g, "tcp", program(t, "tcp", "127.0.0.1:0", func(conn net.Conn) {
		for b := make([]byte, 64<<10); ; {
			if _, err := conn.Write(b); err != nil {
				return
			}
		}
	}).String())
	stuck, err := net.Dial("tcp", flood.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stuck.Close() })
	io.ReadFull(stuck, make([]byte, 1))
}
