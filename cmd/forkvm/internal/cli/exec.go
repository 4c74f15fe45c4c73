package cli

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
)

// defaultOutputLimit is how much of each stream a JSON result holds, in bytes.
const defaultOutputLimit = 8 << 20

// commandFlags say how a command runs in a guest.
type commandFlags struct {
	interactive bool
	terminal    bool
	env         []string
	dir         string
	user        string
	groups      []string
	ulimits     []string
	limits      []client.ResourceLimit // made of ulimits by check
	timeout     time.Duration
	limit       output.Bytes
}

func (c *commandFlags) add(f *pflag.FlagSet) {
	c.limit = defaultOutputLimit
	f.BoolVarP(&c.interactive, "interactive", "i", false, "connect standard input")
	f.BoolVarP(&c.terminal, "tty", "t", false, "give the command a terminal, which is this one")
	f.StringArrayVarP(&c.env, "env", "e", nil, "set NAME=VALUE, or NAME from this environment")
	f.StringVarP(&c.dir, "workdir", "w", "", "working directory")
	f.StringVarP(&c.user, "user", "u", "", "user: name or number, with :group if wanted")
	f.StringArrayVar(&c.groups, "group-add", nil, "one more group for the user: name or number")
	f.StringArrayVar(&c.ulimits, "ulimit", nil, "limit a resource: NAME=SOFT[:HARD], such as nofile=1024:4096")
	f.DurationVar(&c.timeout, "timeout", 0, "kill the command and its descendants after this time; the exit code is 124 then")
	f.Var(&c.limit, "output-limit", "with -o json: how much of each stream is kept")
}

// check finds flags that cannot be followed, before anything is started.
func (c *commandFlags) check(a *app) error {
	if c.terminal {
		if _, err := a.onTerminal(); err != nil {
			return err
		}
	}
	if c.timeout < 0 {
		return usagef("--timeout %v is negative", c.timeout)
	}
	for _, u := range c.ulimits {
		l, err := parseLimit(u)
		if err != nil {
			return err
		}
		c.limits = append(c.limits, l)
	}
	return nil
}

// parseLimit reads NAME=SOFT[:HARD], as docker does. What a name means is the
// guest's business.
func parseLimit(s string) (l client.ResourceLimit, err error) {
	name, values, _ := strings.Cut(s, "=")
	soft, hard, both := strings.Cut(values, ":")
	if !both {
		hard = soft
	}
	l.Name = name
	for _, v := range []struct {
		text string
		to   *int64
	}{{soft, &l.Soft}, {hard, &l.Hard}} {
		if v.text == "unlimited" {
			*v.to = client.Unlimited
		} else if *v.to, err = strconv.ParseInt(v.text, 10, 64); err != nil || *v.to < client.Unlimited {
			return l, usagef("--ulimit %q is not NAME=SOFT[:HARD]", s)
		}
	}
	return l, nil
}

// command is the client's form of a command line.
func (a *app) command(c *commandFlags, argv []string) client.Command {
	cmd := client.Command{Args: argv, Dir: c.dir, User: c.user, Groups: c.groups, Limits: c.limits, Timeout: c.timeout}
	for _, e := range c.env {
		if !strings.Contains(e, "=") {
			value := a.User.Getenv(e)
			if value == "" {
				continue
			}
			e += "=" + value
		}
		cmd.Env = append(cmd.Env, e)
	}
	if c.interactive {
		cmd.Stdin = a.Stdin
	}
	return cmd
}

// splitCommand parses flags that stand behind the first argument, so that they
// may be before or behind it, and returns that argument and the command: no
// command's name begins with a dash.
func splitCommand(f *pflag.FlagSet, args []string) (target string, argv []string, err error) {
	if len(args) == 0 {
		return "", nil, nil
	}
	target, rest := args[0], args[1:]
	if len(rest) > 0 && rest[0] != "--" && strings.HasPrefix(rest[0], "-") && rest[0] != "-" {
		if err := f.Parse(rest); err != nil {
			return "", nil, &usageError{err}
		}
		if f.ArgsLenAtDash() == 0 {
			return target, f.Args(), nil
		}
		rest = f.Args()
	}
	if len(rest) > 0 && rest[0] == "--" {
		rest = rest[1:]
	}
	return target, rest, nil
}

func (a *app) execVerb() *cobra.Command {
	var flags commandFlags
	var more execFlags
	cmd := &cobra.Command{
		Use:   "exec [flags] VM [--] COMMAND [ARG...]",
		Short: "Run a command in a VM",
		Example: "  forkvm exec vm-1 -- make test\n  forkvm exec -o json --timeout 60s vm-1 -- ./run\n" +
			"  forkvm exec -d vm-1 -- ./serve\n  forkvm exec --list vm-1\n  forkvm exec --attach 5e0cb27e9a31 vm-1",
		Annotations: map[string]string{passesExitCode: "yes"},
		Args:        cobra.ArbitraryArgs,
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	flags.add(f)
	more.add(f)
	cmd.RunE = a.onCommand(cmd, func(ctx context.Context, n Node, target string, argv []string) error {
		if err := more.check(&flags, argv); err != nil {
			return err
		}
		if err := flags.check(a); err != nil {
			return err
		}
		vm, err := findRunning(ctx, n, target)
		if err != nil {
			return err
		}
		switch c := a.command(&flags, argv); {
		case more.list:
			return a.listCommands(ctx, vm)
		case more.attach != "":
			return a.runCommand(ctx, vm, attached(vm, more.attach), 0, &flags)
		case more.detach:
			c.OperationID = more.id
			return a.detach(ctx, vm, c)
		default:
			c.OperationID = more.id
			return a.exec(ctx, vm, c, &flags)
		}
	})
	return a.withOutput(cmd)
}

// execFlags are those of exec alone.
type execFlags struct {
	detach, list bool
	id, attach   string
}

func (e *execFlags) add(f *pflag.FlagSet) {
	f.BoolVarP(&e.detach, "detach", "d", false, "leave the command running and print its id")
	f.StringVar(&e.id, "id", "", "detach the command under this name: repeated, the call attaches to it instead of running it again")
	f.StringVar(&e.attach, "attach", "", "attach to the detached command with this id")
	f.BoolVar(&e.list, "list", false, "list the detached commands of the VM")
}

// check finds what does not go together.
func (e *execFlags) check(c *commandFlags, argv []string) error {
	switch {
	case e.attach != "" && e.list:
		return usagef("--attach and --list are two things")
	case e.attach != "" || e.list:
		if len(argv) > 0 || e.detach || e.id != "" || c.interactive || c.terminal {
			return usagef("--attach and --list take a VM and no command")
		}
		return nil
	case len(argv) == 0:
		return usagef("a COMMAND is needed")
	case c.terminal && (e.detach || e.id != ""):
		return usagef("-t: a detached command has no terminal")
	case c.interactive && e.detach:
		return usagef("-i: a command that is left running has no input")
	}
	return nil
}

// onCommand is onNode for verbs that end in a command line for the guest.
func (a *app) onCommand(cmd *cobra.Command, do func(ctx context.Context, n Node, target string, argv []string) error) func(*cobra.Command, []string) error {
	return a.body(func(ctx context.Context, args []string) error {
		target, argv, err := splitCommand(cmd.Flags(), args)
		if err != nil {
			if errors.Is(err, pflag.ErrHelp) {
				return cmd.Help()
			}
			return a.commandFailed(nil, err)
		}
		if help, _ := cmd.Flags().GetBool("help"); help {
			return cmd.Help()
		}
		if target == "" {
			return a.commandFailed(nil, usagef("%s needs an argument", cmd.Name()))
		}
		n, err := a.open()
		if err == nil {
			err = do(ctx, n, target, argv)
		}
		return a.commandFailed(nil, err)
	})
}

// findRunning finds a VM in which commands can run.
func findRunning(ctx context.Context, n Node, ref string) (VM, error) {
	vm, err := n.Find(ref)
	if err != nil {
		return nil, err
	}
	if _, err := runningStatus(ctx, vm); err != nil {
		return nil, err
	}
	return vm, nil
}

// runningStatus is the status of a VM whose guest can be asked something.
func runningStatus(ctx context.Context, vm VM) (*node.Status, error) {
	st, err := vm.Status(ctx)
	if err != nil {
		return nil, err
	}
	switch st.State {
	case node.Running:
		return st, nil
	case node.Paused:
		return nil, failure.New(failure.VMNotRunning, "vm %s is paused; resume it first", vm.Record().Name)
	}
	return nil, failure.New(failure.VMNotRunning, "vm %s is %s", vm.Record().Name, viewOf(vm, st).condition())
}

// runner runs a command, or accompanies one, with limits on its streams.
type runner func(ctx context.Context, stdout, stderr io.Writer, limit int64) (client.Result, error)

// exec runs a command and ends with its exit code.
func (a *app) exec(ctx context.Context, vm VM, c client.Command, flags *commandFlags) error {
	if flags.terminal {
		screen, err := a.openTerminal(&c)
		if err != nil {
			return err
		}
		defer screen.close()
	}
	return a.runCommand(ctx, vm, func(ctx context.Context, stdout, stderr io.Writer, limit int64) (client.Result, error) {
		c.Stdout, c.Stderr, c.StdoutLimit, c.StderrLimit = stdout, stderr, limit, limit
		return vm.Guest().Exec(ctx, c)
	}, c.Timeout, flags)
}

// runCommand shows what a command writes and ends with its exit code.
func (a *app) runCommand(ctx context.Context, vm VM, run runner, timeout time.Duration, flags *commandFlags) error {
	if a.format.Machine() {
		return a.execCaptured(ctx, vm, run, int64(flags.limit))
	}
	result, err := run(ctx, a.Stdout, a.Stderr, 0)
	if err != nil {
		return execFailure(ctx, vm, err)
	}
	a.explainResult(result, timeout)
	return codeOf(result)
}

// explainResult says what an exit code alone does not.
func (a *app) explainResult(r client.Result, timeout time.Duration) {
	if r.Error != nil {
		fmt.Fprintf(a.Stderr, "forkvm: %s\n", output.Visible(r.Error.Message))
	}
	for _, s := range []struct {
		name    string
		dropped int64
	}{{"standard output", r.StdoutDropped}, {"standard error", r.StderrDropped}} {
		if s.dropped > 0 {
			fmt.Fprintf(a.Stderr, "forkvm: %d bytes of %s were not kept\n", s.dropped, s.name)
		}
	}
	switch {
	case !r.TimedOut:
	case timeout > 0:
		fmt.Fprintf(a.Stderr, "forkvm: command was killed after its timeout of %v\n", timeout)
	default:
		fmt.Fprintln(a.Stderr, "forkvm: command was killed after its timeout")
	}
}

func codeOf(r client.Result) error {
	if r.ExitCode == 0 {
		return nil
	}
	return exitCode(r.ExitCode)
}

// execFailure finds out why a command has no result: a VM that was reset or has
// ended explains more than a connection that broke.
func execFailure(ctx context.Context, vm VM, err error) error {
	var lost *client.ConnectionError
	if ctx.Err() != nil || !errors.As(err, &lost) {
		return err
	}
	st := settled(ctx, vm)
	switch {
	case st == nil:
		return err
	case wasReset(vm, st):
		return failure.New(failure.VMReset, "vm %s was reset: %w", vm.Record().Name, err)
	case st.State == node.Running:
		return err
	case st.Exit != nil:
		return failure.New(failure.GuestEnded, "%w", st.Exit)
	}
	return failure.New(failure.VMProcessGone, "the process of vm %s is gone: %w", vm.Record().Name, err)
}

// wasReset reports whether a VM has another life than when it was found.
func wasReset(vm VM, st *node.Status) bool {
	return st.Generation != "" && st.Generation != vm.Record().Identity.Generation
}

// settled is the status of a VM, given a moment: a guest's connections break a
// little before its process has written the report of the end, or a reset guest
// has its identity.
func settled(ctx context.Context, vm VM) *node.Status {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for {
		st, err := vm.Status(ctx)
		if err == nil && (st.State != node.Running || wasReset(vm, st)) {
			return st
		}
		select {
		case <-ctx.Done():
			return st
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// execView is the JSON result of run and exec.
type execView struct {
	Schema string  `json:"schema"`
	VM     *vmName `json:"vm"`
	resultView
	Stdout string `json:"stdout"`
	Stderr string `json:"stderr"`
	// The bytes of a stream that is not UTF-8, in which the text above has
	// replacement characters.
	StdoutBase64 string `json:"stdout_base64,omitempty"`
	StderrBase64 string `json:"stderr_base64,omitempty"`
}

// resultView is how a command ended.
type resultView struct {
	ExitCode  int  `json:"exit_code"`
	Signal    int  `json:"signal"`
	TimedOut  bool `json:"timed_out"`
	OOMKilled bool `json:"oom_killed"`

	StdoutTruncated bool  `json:"stdout_truncated"`
	StderrTruncated bool  `json:"stderr_truncated"`
	StdoutDropped   int64 `json:"stdout_dropped_bytes"`
	StderrDropped   int64 `json:"stderr_dropped_bytes"`

	DurationMS      int64          `json:"duration_ms"`
	PeakMemoryBytes int64          `json:"peak_memory_bytes,omitempty"`
	Error           *failure.Error `json:"error"`
}

func viewOfResult(r client.Result) resultView {
	v := resultView{
		ExitCode: r.ExitCode, Signal: r.Signal, TimedOut: r.TimedOut, OOMKilled: r.OOMKilled,
		StdoutTruncated: r.StdoutTruncated, StderrTruncated: r.StderrTruncated,
		StdoutDropped: r.StdoutDropped, StderrDropped: r.StderrDropped,
		DurationMS: r.DurationMS, PeakMemoryBytes: r.PeakMemoryBytes,
	}
	if e := r.Error; e != nil {
		v.Error = &failure.Error{Code: failure.Code(e.Code), Message: e.Message, Retryable: e.Retryable}
	}
	return v
}

type vmName struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

const execSchema = "forkvm/exec/v1"

// execCaptured runs a command and prints its result as one object.
func (a *app) execCaptured(ctx context.Context, vm VM, run runner, limit int64) error {
	var stdout, stderr bytes.Buffer
	result, err := run(ctx, &stdout, &stderr, limit)
	if err != nil {
		return a.commandFailed(vm, execFailure(ctx, vm, err))
	}
	v := execView{Schema: execSchema, VM: nameOf(vm), resultView: viewOfResult(result)}
	v.Stdout, v.StdoutBase64 = text(stdout.Bytes())
	v.Stderr, v.StderrBase64 = text(stderr.Bytes())
	if err := output.WriteObject(a.Stdout, a.format, v); err != nil {
		return err
	}
	return codeOf(result)
}

func nameOf(vm VM) *vmName {
	if vm == nil {
		return nil
	}
	return &vmName{ID: vm.Record().ID, Name: vm.Record().Name}
}

// text is a stream as JSON can hold it, and in base64 if that loses something.
func text(b []byte) (string, string) {
	if utf8.Valid(b) {
		return string(b), ""
	}
	return strings.ToValidUTF8(string(b), "\uFFFD"), base64.StdEncoding.EncodeToString(b)
}

// commandFailed reports, for programs, a failure that is not the command's in
// the same form as a result. For people the error is left as it is.
func (a *app) commandFailed(vm VM, err error) error {
	var done exitCode
	if err == nil || !a.format.Machine() || errors.As(err, &done) {
		return err
	}
	v := execView{Schema: execSchema, VM: nameOf(vm), resultView: resultView{ExitCode: exitOurs, Error: explain(err)}}
	if err := output.WriteObject(a.Stdout, a.format, v); err != nil {
		return err
	}
	return exitCode(exitOurs)
}
