// Lab runs commands and Go tests in the lab machine.
//
//	lab run COMMAND        run a shell command; its exit status is ours
//	lab test [flags] [packages]   run the Go tests that need KVM
//	lab kernel             print the path of the kernel package, fetching it when needed
//
// LAB_… variables configure the machine; docs/lab.md lists them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/forkvm/forkvm/internal/lab"
)

// Exit statuses that are not the command's own, those of timeout(1) and docker(1).
const (
	exitUsage    = 2
	exitTimedOut = 124
	exitLab      = 125
)

const usage = "usage: lab run COMMAND | lab test [-v] [-run REGEXP] [-bench REGEXP] [packages] | lab kernel\n"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	code, err := dispatch(ctx, os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "lab: %v\n", err)
	}
	stop()
	os.Exit(code)
}

// dispatch runs a verb. An error with exit status 0 is the lab's.
func dispatch(ctx context.Context, args []string) (int, error) {
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		return exitUsage, nil
	}
	var err error
	code := 0
	switch verb, rest := args[0], args[1:]; verb {
	case "run":
		code, err = runCommand(ctx, rest)
	case "test":
		code, err = runTests(ctx, rest)
	case "kernel":
		code, err = printKernel(ctx)
	default:
		fmt.Fprint(os.Stderr, usage)
		return exitUsage, nil
	}
	if err == nil || code != 0 {
		return code, err
	}
	var stopped *lab.StoppedError
	if errors.As(err, &stopped) && errors.Is(err, context.DeadlineExceeded) {
		return exitTimedOut, err
	}
	return exitLab, err
}

func printKernel(ctx context.Context) (int, error) {
	path, err := lab.FetchKernel(ctx, "")
	if err != nil {
		return 0, err
	}
	fmt.Println(path)
	return 0, nil
}
