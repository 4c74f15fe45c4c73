package client_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/forkvm/forkvm/agent/client"
)

func ExampleClient_Exec() {
	dial := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", "/run/forkvm/vm1/agent.sock")
	}
	c := client.New(client.Config{Dial: dial})
	ctx := context.Background()
	if _, err := c.WaitReady(ctx); err != nil {
		fmt.Println(err)
		return
	}
	result, err := c.Exec(ctx, client.Command{
		Args:    []string{"pytest", "-q"},
		Dir:     "/work",
		Stdout:  os.Stdout,
		Stderr:  os.Stderr,
		Timeout: 10 * time.Minute,
	})
	switch {
	case err != nil:
		fmt.Println("the machine failed:", err)
	case result.TimedOut:
		fmt.Println("the tests took too long")
	default:
		fmt.Println("exit code", result.ExitCode)
	}
}

func ExampleClient_Attach() {
	dial := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", "/run/forkvm/vm1/agent.sock")
	}
	c := client.New(client.Config{Dial: dial})
	ctx := context.Background()
	// The id makes it safe to repeat the call: the command runs once.
	started, err := c.Detach(ctx, client.Command{Args: []string{"make", "test"}, Dir: "/work", OperationID: "test-7"})
	if err != nil {
		fmt.Println("not known to have started:", err)
		return
	}
	fmt.Println("running as process", started.PID)
	// Later, by this program or another one.
	ended, err := c.Attach(ctx, "test-7", client.Attachment{Stdout: os.Stdout, Stderr: os.Stderr})
	if err != nil {
		fmt.Println("the machine failed:", err)
		return
	}
	fmt.Println("exit code", ended.Result.ExitCode)
}
