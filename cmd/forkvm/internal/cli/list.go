package cli

import (
	"context"
	"errors"
	"sync"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
)

func (a *app) listVerb() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:     "ls [flags]",
		Aliases: []string{"ps", "list"},
		Short:   "List VMs",
		Example: "  forkvm ls -a\n  forkvm ls --format '{{json .}}'\n  forkvm rm -f $(forkvm ls -aq)",
		Args:    needs(),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "show VMs that have ended, too")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, _ []string) error {
		vms, err := n.List()
		if err != nil {
			return err
		}
		return show(a, a.vmList(lookAtAll(ctx, vms, all)))
	})
	a.withQuiet(cmd, "print ids only")
	a.withTemplate(cmd)
	return a.withOutput(cmd)
}

// lookAtAll asks all VMs at once: one that hangs does not hold up the others.
func lookAtAll(ctx context.Context, vms []VM, all bool) []vmView {
	views := make([]vmView, len(vms))
	var asked sync.WaitGroup
	for i, vm := range vms {
		asked.Go(func() { views[i] = look(ctx, vm) })
	}
	asked.Wait()
	shown := views[:0]
	for _, v := range views {
		if all || v.State != node.Ended && v.State != node.Dead {
			shown = append(shown, v)
		}
	}
	return shown
}

func (a *app) inspectVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect [flags] VM...",
		Short: "Show everything about VMs, as a JSON array",
		Args:  needs("VM..."),
	}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, refs []string) error {
		var views []vmView
		failed := a.each(refs, func(ref string) error {
			vm, err := n.Find(ref)
			if err == nil {
				views = append(views, look(ctx, vm))
			}
			return err
		})
		l := a.vmList(views)
		if a.template != "" {
			return errors.Join(l.WriteTemplate(a.Stdout, a.template), failed)
		}
		return errors.Join(l.Write(a.Stdout, output.JSON), failed)
	})
	return a.withTemplate(cmd)
}

// each does something for every reference, complains of each that fails and goes
// on. It returns an exit code if one did.
func (a *app) each(refs []string, do func(ref string) error) error {
	var failed error
	for _, ref := range refs {
		if err := do(ref); err != nil {
			a.complain(err)
			failed = exitCode(exitFailure)
		}
	}
	return failed
}

// outcome is what became of one VM of a verb that changes several.
type outcome struct {
	VM    string         `json:"vm"`
	Error *failure.Error `json:"error,omitempty"`
}

// change does something to each VM and prints what the VM was called, as docker
// does. One that fails does not keep the others from it.
func (a *app) change(ctx context.Context, n Node, refs []string, do func(context.Context, VM) error) error {
	results := output.List[outcome]{
		Header: []string{"VM", "ERROR"},
		Name:   func(o outcome) string { return o.VM },
	}
	failed := a.eachUnlessMachine(refs, func(ref string) error {
		vm, err := n.Find(ref)
		if err == nil {
			err = do(ctx, vm)
		}
		o := outcome{VM: ref}
		if err != nil {
			o.Error = explain(err)
		}
		if a.format.Machine() || err == nil {
			results.Items = append(results.Items, o)
		}
		return err
	})
	format := a.format
	if !format.Machine() {
		format = output.Name
	}
	return errors.Join(results.Write(a.Stdout, format), failed)
}

// eachUnlessMachine is each, silent where the errors are part of the output.
func (a *app) eachUnlessMachine(refs []string, do func(ref string) error) error {
	if !a.format.Machine() {
		return a.each(refs, do)
	}
	var failed error
	for _, ref := range refs {
		if do(ref) != nil {
			failed = exitCode(exitFailure)
		}
	}
	return failed
}
