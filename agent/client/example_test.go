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
