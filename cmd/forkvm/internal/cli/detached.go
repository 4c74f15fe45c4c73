package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
)

// commandView is a detached command as the command line shows it.
type commandView struct {
	Schema      string      `json:"schema"`
	VM          *vmName     `json:"vm"`
	ID          string      `json:"id"`
	Args        []string    `json:"args"`
	PID         int         `json:"pid"`
	State       string      `json:"state"`
	AgeMS       int64       `json:"age_ms"`
	Stdout      keptView    `json:"stdout"`
	Stderr      keptView    `json:"stderr"`
	Result      *resultView `json:"result,omitempty"`
	Containment string      `json:"containment,omitempty"`
}

// keptView is what there was of a stream, and from where on it is kept.
type keptView struct {
	Bytes    int64 `json:"bytes"`
	KeptFrom int64 `json:"kept_from"`
}

const commandSchema = "forkvm/command/v1"

func viewOfCommand(vm VM, d client.Detached) commandView {
	v := commandView{
		Schema: commandSchema, VM: nameOf(vm), ID: d.ID, Args: d.Args, PID: d.PID, State: proto.CommandEnded,
		AgeMS: d.Age.Milliseconds(), Containment: d.Containment,
		Stdout: keptView{d.Stdout.Bytes, d.Stdout.From}, Stderr: keptView{d.Stderr.Bytes, d.Stderr.From},
	}
	if d.Running {
		v.State = proto.CommandRunning
	}
	if d.Result != nil {
		r := viewOfResult(*d.Result)
		v.Result = &r
	}
	return v
}

// condition is the state, and for an ended command its exit code.
func (v commandView) condition() string {
	if v.Result == nil {
		return v.State
	}
	return v.State + " (" + strconv.Itoa(v.Result.ExitCode) + ")"
}

// detach starts a command, leaves it running and prints its id.
func (a *app) detach(ctx context.Context, vm VM, c client.Command) error {
	d, err := vm.Guest().Detach(ctx, c)
	if err != nil {
		return a.commandFailed(vm, execFailure(ctx, vm, err))
	}
	if a.format.Machine() {
		err = output.WriteObject(a.Stdout, a.format, viewOfCommand(vm, d))
	} else if d.Result == nil || d.Result.Error == nil {
		_, err = fmt.Fprintln(a.Stdout, d.ID)
	} else {
		a.explainResult(*d.Result, c.Timeout)
	}
	if err == nil && d.Result != nil && d.Result.Error != nil {
		return codeOf(*d.Result)
	}
	return err
}

// attached is a runner for a command that was started before.
func attached(vm VM, id string) runner {
	return func(ctx context.Context, stdout, stderr io.Writer, limit int64) (client.Result, error) {
		first, second := limited(stdout, limit), limited(stderr, limit)
		d, err := vm.Guest().Attach(ctx, id, client.Attachment{Stdout: first, Stderr: second})
		if err != nil || d.Result == nil {
			return client.Result{}, err
		}
		r := *d.Result
		first.count(&r.StdoutBytes, &r.StdoutDropped, &r.StdoutTruncated)
		second.count(&r.StderrBytes, &r.StderrDropped, &r.StderrTruncated)
		return r, nil
	}
}

// limitedWriter passes on the first bytes only.
type limitedWriter struct {
	w       io.Writer
	left    int64 // -1: no limit
	dropped int64
}

// limited writes at most limit bytes to w; 0: all.
func limited(w io.Writer, limit int64) *limitedWriter {
	if limit == 0 {
		limit = -1
	}
	return &limitedWriter{w: w, left: limit}
}

func (l *limitedWriter) Write(p []byte) (int, error) {
	keep := p
	if l.left >= 0 {
		keep = p[:min(int64(len(p)), l.left)]
		l.left -= int64(len(keep))
		l.dropped += int64(len(p) - len(keep))
	}
	if n, err := l.w.Write(keep); err != nil {
		return n, err
	}
	return len(p), nil
}

// count adds what was not passed on to a result.
func (l *limitedWriter) count(bytes, dropped *int64, truncated *bool) {
	*bytes -= l.dropped
	*dropped += l.dropped
	*truncated = *truncated || l.dropped > 0
}

// listCommands shows the detached commands of a VM.
func (a *app) listCommands(ctx context.Context, vm VM) error {
	all, err := vm.Guest().Commands(ctx)
	if err != nil {
		return a.commandFailed(vm, execFailure(ctx, vm, err))
	}
	l := output.List[commandView]{
		Header: []string{"ID", "STATE", "STARTED", "PID", "COMMAND"},
		Row: func(v commandView) []string {
			return []string{v.ID, v.condition(), output.Age(time.Duration(v.AgeMS) * time.Millisecond), strconv.Itoa(v.PID), output.Visible(strings.Join(v.Args, " "))}
		},
		Name: func(v commandView) string { return v.ID },
	}
	for _, d := range all {
		l.Items = append(l.Items, viewOfCommand(vm, d))
	}
	return show(a, l)
}

// showCommand prints what a detached command has written, and with follow what it
// will.
func (a *app) showCommand(ctx context.Context, vm VM, id string, follow bool) error {
	return a.visibly(a.Stdout, func(w io.Writer) error {
		d, err := vm.Guest().Attach(ctx, id, client.Attachment{Stdout: w, Stderr: a.Stderr, Now: !follow})
		if err != nil {
			return execFailure(ctx, vm, err)
		}
		for _, s := range []struct {
			name string
			kept client.Kept
		}{{"standard output", d.Stdout}, {"standard error", d.Stderr}} {
			if s.kept.Lost > 0 {
				fmt.Fprintf(a.Stderr, "forkvm: the first %d bytes of %s are not kept any more\n", s.kept.Lost, s.name)
			}
		}
		return nil
	})
}

// waitForCommand waits for a detached command's end and prints its exit code, as
// docker does.
func (a *app) waitForCommand(ctx context.Context, vm VM, id string) error {
	d, err := vm.Guest().Attach(ctx, id, client.Attachment{})
	if err != nil {
		return execFailure(ctx, vm, err)
	}
	if a.format.Machine() {
		return output.WriteObject(a.Stdout, a.format, viewOfCommand(vm, d))
	}
	_, err = fmt.Fprintln(a.Stdout, d.Result.ExitCode)
	return err
}

// killCommand sends a signal to a detached command: SIGKILL to all of it, any other
// to its main process and what shares its process group.
func killCommand(ctx context.Context, vm VM, id, signal string) error {
	number, err := signalNumber(signal)
	if err != nil {
		return err
	}
	d, err := vm.Guest().Signal(ctx, id, number, number == int(syscall.SIGKILL))
	if err == nil && !d.Running {
		return failure.New(failure.InvalidArgument, "command %s of vm %s has ended", id, vm.Record().Name)
	}
	return execFailure(ctx, vm, err)
}

// signalNumber reads TERM, SIGTERM or 15.
func signalNumber(s string) (int, error) {
	if n, err := strconv.Atoi(s); err == nil && n >= 1 && n <= 64 {
		return n, nil
	}
	name := strings.ToUpper(s)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	if n := unix.SignalNum(name); n != 0 {
		return int(n), nil
	}
	return 0, usagef("--signal %q is no signal", s)
}

// oneVM finds the VM of a verb that has the flag --command.
func oneVM(ctx context.Context, n Node, refs []string) (VM, error) {
	if len(refs) != 1 {
		return nil, &usageError{errors.New("--command is about one VM")}
	}
	return findRunning(ctx, n, refs[0])
}
