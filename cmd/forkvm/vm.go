package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/process"
)

// vmVerb is the hidden verb with which forkvm starts itself as a VM's process.
const vmVerb = "vm"

// serveVM is a VM's process from its beginning to its end. Its standard error is
// the VM's process log.
func serveVM() int {
	launch, err := launchSocket()
	if err != nil {
		fmt.Fprintf(os.Stderr, "forkvm vm: %v\n", err)
		return 2
	}
	// Whoever ends all processes of a session means the guest, too. Broken pipes
	// are errors of the connection that they belong to.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)
	if err := process.Serve(ctx, launch); err != nil {
		fmt.Fprintf(os.Stderr, "forkvm vm: %v\n", err)
		return 1
	}
	return 0
}

// launchSocket is the socket through which the starting program says what to
// run. People who type the verb have none.
func launchSocket() (*os.File, error) {
	kind, err := unix.GetsockoptInt(process.LaunchDescriptor, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		return nil, errors.New("this verb is for forkvm itself, which starts each VM's process with it")
	}
	unix.CloseOnExec(process.LaunchDescriptor)
	return os.NewFile(process.LaunchDescriptor, "launch"), nil
}
