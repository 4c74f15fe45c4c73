package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
)

// loopback makes connections from this machine to itself possible.
func loopback(t *testing.T) {
	t.Helper()
	if !testkit.InLab() {
		testkit.Require(t, "lab", "loads a kernel module: run it in the lab (make test-lab)")
	}
	testkit.RequireKVM(t)
	if out, err := exec.Command("modprobe", "vsock_loopback").CombinedOutput(); err != nil {
		t.Fatalf("modprobe vsock_loopback: %v: %s", err, out)
	}
}

func dialLoopback(context.Context) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_LOCAL, Port: 7777}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &vsockConn{File: os.NewFile(uintptr(fd), "vsock")}, nil
}

func serveVsock(t *testing.T, peer uint32) *client.Client {
	t.Helper()
	testkit.NoLeaks(t)
	l, err := listenVsock(7777, peer)
	if err != nil {
		t.Fatal(err)
	}
	a, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- a.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; !errors.Is(err, context.Canceled) {
			t.Errorf("serve: %v", err)
		}
		a.Close()
	})
	return client.New(client.Config{Dial: dialLoopback})
}

// The agent works over real vsock sockets, both ways at once.
func TestVsock(t *testing.T) {
	loopback(t)
	c := serveVsock(t, unix.VMADDR_CID_LOCAL)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := c.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	input := strings.Repeat("vsock ", 300_000)
	var out strings.Builder
	r, err := c.Exec(ctx, client.Command{Args: []string{"cat"}, Stdin: strings.NewReader(input), Stdout: &out})
	if err != nil || r.ExitCode != 0 || out.String() != input {
		t.Errorf("got %+v, %v, %d bytes of %d", r, err, out.Len(), len(input))
	}
}

// A program in the guest is not the host, whatever it is allowed to connect to.
func TestVsockTurnsLocalProgramsAway(t *testing.T) {
	loopback(t)
	c := serveVsock(t, unix.VMADDR_CID_HOST)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := c.Exec(ctx, client.Command{Args: []string{"true"}, Stdout: io.Discard})
	var lost *client.ConnectionError
	if !errors.As(err, &lost) || lost.Started {
		t.Errorf("error %v, want a connection that is closed at once", err)
	}
}
