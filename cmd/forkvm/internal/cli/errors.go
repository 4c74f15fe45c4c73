package cli

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
)

// Exit codes. Those of run and exec leave room for the command's own, as with
// env(1), timeout(1) and docker.
const (
	exitFailure  = 1
	exitUsage    = 2
	exitTimeout  = 124
	exitOurs     = 125 // run and exec: the failure is not the command's
	exitSignal   = 128 // plus the number of the signal
	exitKilled   = exitSignal + int(syscall.SIGKILL)
	exitPipeGone = exitSignal + int(syscall.SIGPIPE)
)

// Interrupted is the cause of a context that a signal cancelled.
type Interrupted struct{ Signal syscall.Signal }

func (e *Interrupted) Error() string { return "interrupted: " + e.Signal.String() }

// exitCode ends the program with a code and no message: everything is said.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError is a command line that makes no sense.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

// explain gives an error its code. What a guest agent answered keeps the agent's
// word for it.
func explain(err error) *failure.Error {
	var answered *client.Error
	var have *failure.Error
	var usage *usageError
	var unreachable *client.ConnectionError
	switch {
	case errors.As(err, &usage):
		return failure.New(failure.InvalidArgument, "%w", err)
	case errors.As(err, &have):
		return failure.As(have.Code, err)
	case errors.As(err, &answered):
		return &failure.Error{Code: failure.Code(answered.Code), Message: err.Error(), Retryable: answered.Retryable}
	case errors.As(err, &unreachable) && !errors.Is(err, context.Canceled):
		return failure.New(failure.GuestNotReady, "%w", err)
	}
	return failure.As(failure.Internal, err)
}

// errorObject is how JSON output carries an error.
type errorObject struct {
	Error *failure.Error `json:"error"`
}

// complain prints an error as one line, or as an object for programs.
func (a *app) complain(err error) {
	e := explain(err)
	if a.format.Machine() {
		output.WriteObject(a.Stderr, output.JSONL, errorObject{e})
		return
	}
	// The text may quote a guest.
	fmt.Fprintf(a.Stderr, "forkvm: %s\n", output.Visible(e.Message))
}

// finish prints the error that a verb ended with and returns the exit code.
func (a *app) finish(ctx context.Context, err error) int {
	var code exitCode
	var signal *Interrupted
	var usage *usageError
	failed := exitFailure
	if a.passesExitCode {
		failed = exitOurs
	}
	switch {
	case err == nil:
		return 0
	case errors.As(context.Cause(ctx), &signal):
		return exitSignal + int(signal.Signal)
	case errors.As(err, &code):
		return int(code)
	case a.stdout.broken.Load():
		return exitPipeGone // as with a program that SIGPIPE ended
	case !a.entered, errors.As(err, &usage):
		a.complain(&usageError{err})
		if !a.format.Machine() {
			fmt.Fprintf(a.Stderr, "Run '%s --help' for how it is used.\n", a.path)
		}
		if a.passesExitCode {
			return exitOurs
		}
		return exitUsage
	}
	a.complain(err)
	return failed
}
