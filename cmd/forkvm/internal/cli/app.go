package cli

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/doctor"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/settings"
)

// Environment is everything that the verbs touch.
type Environment struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// StdoutTerminal and StderrTerminal: the stream ends on a terminal.
	StdoutTerminal, StderrTerminal bool
	User                           settings.User
	Now                            func() time.Time
	// Version is this program's.
	Version string
	// GuestAgent is the guest agent's program, which image build puts into images.
	GuestAgent string
	// OpenNode opens the node in these directories.
	OpenNode func(settings.Settings) (Node, error)
	// Examine is doctor.Run.
	Examine func(context.Context, doctor.Config) doctor.Report
}

// Main runs one command line, without the program's name, and returns the exit
// code.
func Main(ctx context.Context, e Environment, args []string) int {
	stdout := &watchedWriter{w: e.Stdout}
	e.Stdout = stdout
	a := &app{Environment: e, stdout: stdout, format: output.Table, path: "forkvm"}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(e.Stdin)
	root.SetOut(e.Stdout)
	root.SetErr(e.Stderr)
	cmd, err := root.ExecuteContextC(ctx)
	a.path = cmd.CommandPath()
	a.passesExitCode = cmd.Annotations[passesExitCode] != ""
	return a.finish(ctx, err)
}

// app is one run of the command line.
type app struct {
	Environment
	stdout      *watchedWriter // Stdout, again
	directories settings.Flags
	format      output.Format
	template    string
	quiet       bool

	// path and passesExitCode are of the verb that ran.
	path           string
	passesExitCode bool
	// entered: the verb has begun. Errors before that are about usage.
	entered bool
}

// watchedWriter remembers that nobody reads any more.
type watchedWriter struct {
	w      io.Writer
	broken atomic.Bool
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		w.broken.Store(true)
	}
	return n, err
}

// passesExitCode marks verbs whose exit code is a guest command's.
const passesExitCode = "exit-code"

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "forkvm",
		Short: "Virtual machines that fork",
		Long: "forkvm boots Linux guests on KVM, freezes them as snapshots and makes running\n" +
			"copies of them.",
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          groupHelp,
		Args:          cobra.ArbitraryArgs,
	}
	f := root.PersistentFlags()
	f.StringVar(&a.directories.DataDir, "data-dir", "", "where images and snapshots are (FORKVM_DATA_DIR)")
	f.StringVar(&a.directories.RunDir, "run-dir", "", "where running VMs are (FORKVM_RUN_DIR)")
	f.StringVar(&a.directories.Config, "config", "", "configuration file (FORKVM_CONFIG)")
	root.CompletionOptions.HiddenDefaultCmd = false
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Making VMs:"},
		&cobra.Group{ID: "use", Title: "Working in VMs:"},
		&cobra.Group{ID: "life", Title: "Looking after VMs:"},
		&cobra.Group{ID: "records", Title: "Looking back:"},
		&cobra.Group{ID: "node", Title: "This machine:"},
	)
	root.SetHelpCommandGroupID("node")
	root.SetCompletionCommandGroupID("node")
	a.add(root, "run", a.runVerb(), a.createVerb(), a.restoreVerb(), a.forkVerb())
	a.add(root, "use", a.execVerb(), a.shellVerb(), a.copyVerb(), a.portVerb(), a.logsVerb(), a.rewardVerb())
	a.add(root, "records", a.logVerbs(), a.treeVerb(), a.diffVerb(), a.replayVerb())
	a.add(root, "life", a.listVerb(), a.inspectVerb(), a.statsVerb(), a.pauseVerb(), a.resumeVerb(), a.resetVerb(), a.networkVerb(), a.waitVerb(), a.killVerb(), a.removeVerb())
	a.add(root, "node", a.imageVerbs(), a.snapshotVerbs(), a.taskVerbs(), a.prepareVerb(), a.doctorVerb(), a.versionVerb())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	return root
}

func (a *app) add(root *cobra.Command, group string, verbs ...*cobra.Command) {
	for _, v := range verbs {
		v.GroupID = group
		root.AddCommand(v)
	}
}

// groupHelp is what a command with verbs below it does without one of them.
func groupHelp(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unknown command %q for %q%s", args[0], cmd.CommandPath(), suggestions(cmd, args[0]))
	}
	return cmd.Help()
}

func suggestions(cmd *cobra.Command, typed string) string {
	cmd.SuggestionsMinimumDistance = 2
	if found := cmd.SuggestionsFor(typed); len(found) > 0 {
		return ", did you mean " + strings.Join(found, " or ") + "?"
	}
	return ""
}

// needs checks the arguments of a verb against their names; one that ends in ...
// may be there more than once.
func needs(names ...string) cobra.PositionalArgs {
	many := len(names) > 0 && strings.HasSuffix(names[len(names)-1], "...")
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return usagef("%s needs %s", cmd.Name(), strings.Join(names, " and "))
		case len(args) > len(names) && !many:
			return usagef("%s: argument %q is one too many", cmd.Name(), args[len(names)])
		}
		return nil
	}
}

// upTo is needs for arguments that may be left out.
func upTo(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		return needs(names[:min(len(args), len(names))]...)(cmd, args)
	}
}

// body is a verb's RunE. Errors before it is entered are about usage.
func (a *app) body(do func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		a.entered = true
		if a.template != "" {
			if _, err := output.ParseTemplate(a.template); err != nil {
				return &usageError{err}
			}
		}
		return do(cmd.Context(), args)
	}
}

// onNode is body for a verb that needs the node.
func (a *app) onNode(do func(ctx context.Context, n Node, args []string) error) func(*cobra.Command, []string) error {
	return a.body(func(ctx context.Context, args []string) error {
		n, err := a.open()
		if err != nil {
			return err
		}
		return do(ctx, n, args)
	})
}

func (a *app) open() (Node, error) {
	s, err := settings.Resolve(a.directories, a.User)
	if err != nil {
		return nil, err
	}
	return a.OpenNode(s)
}

// withOutput gives a verb the flag -o.
func (a *app) withOutput(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().VarP(&a.format, "output", "o", "how results are printed")
	cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(
		[]string{"table", "json", "jsonl", "name"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// withQuiet gives a verb the flag -q.
func (a *app) withQuiet(cmd *cobra.Command, meaning string) *cobra.Command {
	cmd.Flags().BoolVarP(&a.quiet, "quiet", "q", false, meaning)
	return cmd
}

// withTemplate gives a verb the flag --format.
func (a *app) withTemplate(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().StringVar(&a.template, "format", "", "Go template for each item, such as '{{json .}}'")
	return cmd
}

// show prints a list as the flags -o, -q and --format say.
func show[T any](a *app, l output.List[T]) error {
	switch {
	case a.template != "":
		return l.WriteTemplate(a.Stdout, a.template)
	case a.quiet && a.format == output.Table:
		return l.Write(a.Stdout, output.Name)
	}
	return l.Write(a.Stdout, a.format)
}
