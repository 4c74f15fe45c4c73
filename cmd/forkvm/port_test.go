package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
)

// A program in a guest that has no network is reached from the host, also after a
// reset, and until the VM ends.
func TestPort(t *testing.T) {
	h := newHost(t, "")
	h.start("server")
	h.must("exec", "-d", "server", "--", "nc", "-ll", "-p", "5432", "-e", "cat")
	h.must("snapshot", "server", "serving", "--ready", "port:5432", slowly)
	h.must("create", slowly, "--snapshot", "serving", "--name", "clone")

	cmd := h.command(t.Context(), "port", "clone", "5432")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	echo := func(text string) {
		t.Helper()
		conn, err := net.Dial("tcp", strings.TrimSpace(address))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		go func() {
			fmt.Fprint(conn, text)
			conn.(*net.TCPConn).CloseWrite()
		}()
		if got, err := io.ReadAll(conn); err != nil || string(got) != text {
			t.Errorf("got %.80q (%d bytes), %v", got, len(got), err)
		}
	}
	t.Logf("port listens at %s", address)
	echo("hello\n")
	t.Log("echoed a line")
	echo(strings.Repeat("0123456789abcdef", 1<<16))
	h.must("reset", "clone", slowly)
	echo("after the reset\n")
	h.must("kill", "clone")
	if err := cmd.Wait(); err != nil {
		t.Errorf("port ends with %v", err)
	}
	if conn, err := net.Dial("tcp", strings.TrimSpace(address)); err == nil {
		conn.Close()
		t.Error("the port is open after the VM's end")
	}
}
