package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// Main is a VM's process from its beginning to its end, and returns its exit status. Its standard error is the VM's process
// log. program is what it calls itself there.
func Main(program string, o Options) int {
	launch, err := launchSocket()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
		return 2
	}
	// Whoever ends all processes of a session means the guest, too. Broken pipes
	// are errors of the connection that they belong to.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)
	if err := Serve(ctx, launch, o); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", program, err)
		return 1
	}
	return 0
}

// launchSocket is the socket through which the starting program says what to
// run. People who type the verb have none.
func launchSocket() (*os.File, error) {
	kind, err := unix.GetsockoptInt(LaunchDescriptor, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		return nil, errors.New("this is for forkvm itself, which starts each VM's process with it")
	}
	unix.CloseOnExec(LaunchDescriptor)
	return os.NewFile(LaunchDescriptor, "launch"), nil
}
