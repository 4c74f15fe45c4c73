package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/vmm"
)

// changeVerb is a verb that does one thing to each VM that it is given.
func (a *app) changeVerb(use, short string, do func(context.Context, VM) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: needs("VM...")}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, refs []string) error {
		return a.change(ctx, n, refs, do)
	})
	return a.withOutput(cmd)
}

func (a *app) pauseVerb() *cobra.Command {
	return a.changeVerb("pause VM...", "Stop VMs until resume", func(ctx context.Context, vm VM) error { return vm.Pause(ctx) })
}

func (a *app) resumeVerb() *cobra.Command {
	return a.changeVerb("resume VM...", "Let paused VMs go on", func(ctx context.Context, vm VM) error { return vm.Resume(ctx) })
}

func (a *app) resetVerb() *cobra.Command {
	var options node.ResetOptions
	cmd := a.changeVerb("reset [flags] VM...", "Put VMs back to the snapshot they came from", func(ctx context.Context, vm VM) error {
		_, err := vm.Reset(ctx, options)
		return err
	})
	cmd.Example = "  forkvm reset vm-1\n  forkvm reset vm-1 --to step-3"
	cmd.Flags().StringVar(&options.To, "to", "", "go back to this snapshot, and from then on come from it")
	cmd.Flags().DurationVar(&options.ReadyTimeout, "ready-timeout", node.DefaultReadyTimeout, "how long to wait for the guest agent")
	return cmd
}

func (a *app) killVerb() *cobra.Command {
	var command, signal string
	cmd := a.changeVerb("kill [flags] VM...", "End VMs at once, or a detached command", func(ctx context.Context, vm VM) error {
		if command != "" {
			return killCommand(ctx, vm, command, signal)
		}
		return vm.Kill(ctx)
	})
	cmd.Example = "  forkvm kill vm-1\n  forkvm kill --command 5e0cb27e9a31 --signal TERM vm-1"
	cmd.Flags().StringVar(&command, "command", "", "the detached command with this id, instead of the VM")
	cmd.Flags().StringVarP(&signal, "signal", "s", "KILL", "with --command: the signal; KILL goes to all processes of the command")
	return cmd
}

func (a *app) removeVerb() *cobra.Command {
	var force bool
	cmd := a.changeVerb("rm [flags] VM...", "Remove VMs that have ended", func(ctx context.Context, vm VM) error { return vm.Remove(ctx, force) })
	cmd.Flags().BoolVarP(&force, "force", "f", false, "kill running VMs first")
	return cmd
}

// endView is how one VM ended.
type endView struct {
	Schema string         `json:"schema"`
	VM     string         `json:"vm"`
	Exit   *vmm.Exit      `json:"exit,omitempty"`
	Error  *failure.Error `json:"error,omitempty"`
}

const endSchema = "forkvm/end/v1"

func (a *app) waitVerb() *cobra.Command {
	var command string
	cmd := &cobra.Command{
		Use:   "wait [flags] VM...",
		Short: "Wait until VMs have ended and print why",
		Args:  needs("VM..."),
	}
	cmd.Flags().StringVar(&command, "command", "", "wait for the detached command with this id, and print its exit code")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, refs []string) error {
		if command != "" {
			vm, err := oneVM(ctx, n, refs)
			if err != nil {
				return err
			}
			return a.waitForCommand(ctx, vm, command)
		}
		ends := output.List[endView]{Name: func(e endView) string { return string(e.Exit.Reason) }}
		failed := a.eachUnlessMachine(refs, func(ref string) error {
			exit, err := waitFor(ctx, n, ref)
			e := endView{Schema: endSchema, VM: ref, Exit: exit}
			if err != nil {
				e.Error = explain(err)
			}
			if a.format.Machine() || err == nil {
				ends.Items = append(ends.Items, e)
			}
			return err
		})
		format := a.format
		if !format.Machine() {
			format = output.Name
		}
		return errors.Join(ends.Write(a.Stdout, format), failed)
	})
	return a.withOutput(cmd)
}

func waitFor(ctx context.Context, n Node, ref string) (*vmm.Exit, error) {
	vm, err := n.Find(ref)
	if err != nil {
		return nil, err
	}
	return vm.Wait(ctx)
}
