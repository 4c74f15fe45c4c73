package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/vmm"
)

// cleanupTimeout bounds what a foreground run does after it was interrupted.
const cleanupTimeout = 10 * time.Second

func (a *app) runVerb() *cobra.Command {
	var boot bootFlags
	var command commandFlags
	var detach, remove bool
	cmd := &cobra.Command{
		Use:   "run [flags] IMAGE|SNAPSHOT|STEP [--] [COMMAND [ARG...]]",
		Short: "Start a VM, run a command in it and end it",
		Long: "Start a VM from an image, a snapshot or a step of a rollout (ROLLOUT@LINE, see log),\n" +
			"run a command in it and end it. The exit code is the command's. Without a command the console is shown until the guest ends; with -d\n" +
			"the id is printed and the VM stays, with the command running in it under the id\n" +
			"run, see exec --attach.",
		Example: "  forkvm run --rm debian -- uname -a\n" +
			"  forkvm run --cpus 4 --memory 6G debian -- make test\n" +
			"  forkvm run -d --name db debian\n" +
			"  forkvm run --rm attempt-7@12 -- git diff",
		Annotations: map[string]string{passesExitCode: "yes"},
		Args:        cobra.ArbitraryArgs,
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	boot.add(f)
	command.add(f)
	f.BoolVarP(&detach, "detach", "d", false, "leave the VM running and print its id")
	f.BoolVar(&remove, "rm", false, "remove the VM when it has ended")
	cmd.RunE = a.onCommand(cmd, func(ctx context.Context, n Node, image string, argv []string) error {
		if err := command.check(a); err != nil {
			return err
		}
		if !detach {
			return a.runForeground(ctx, n, image, &boot, remove, func(ctx context.Context, vm VM) error {
				if len(argv) == 0 {
					return a.attach(ctx, vm)
				}
				return a.exec(ctx, vm, a.command(&command, argv), &command)
			})
		}
		switch {
		case remove:
			return usagef("-d and --rm: nobody would be there to remove the VM; use 'forkvm rm'")
		case command.interactive || command.terminal:
			return usagef("-d: a command that is left running has neither input nor a terminal")
		case len(argv) == 0:
			return a.created(boot.bring(ctx, n, image))
		}
		return a.createBusy(ctx, n, image, &boot, a.command(&command, argv))
	})
	a.withQuiet(cmd, "no messages")
	return a.withOutput(cmd)
}

// firstCommand is the id of the detached command with which a VM was made.
const firstCommand = "run"

// createBusy makes a VM and leaves it, and a command in it, running.
func (a *app) createBusy(ctx context.Context, n Node, image string, boot *bootFlags, c client.Command) error {
	vm, err := boot.bring(ctx, n, image)
	if err != nil {
		return err
	}
	c.OperationID = firstCommand
	d, err := vm.Guest().Detach(ctx, c)
	if err == nil && d.Result != nil && d.Result.Error != nil {
		a.explainResult(*d.Result, c.Timeout)
		err = codeOf(*d.Result)
	}
	if err != nil {
		return errors.Join(err, end(ctx, vm, true))
	}
	return a.showCreated(vm)
}

// runForeground makes a VM for the time of one call. However the call ends, the
// VM ends with it.
func (a *app) runForeground(ctx context.Context, n Node, image string, boot *bootFlags, remove bool, do func(context.Context, VM) error) error {
	o, err := boot.options()
	if err != nil {
		return err
	}
	o.Attached, o.Passing = true, remove // not even a killed command leaves its VM behind
	if remove && o.Recording == "" {
		o.Recording = node.RecordNone // nothing is to be left
	}
	vm, err := boot.start(ctx, func() (VM, error) { return bring(ctx, n, image, o) })
	if err != nil {
		return err
	}
	return a.whileItLives(ctx, vm, remove, do)
}

// bring makes a VM that stays.
func (b *bootFlags) bring(ctx context.Context, n Node, from string) (VM, error) {
	o, err := b.options()
	if err != nil {
		return nil, err
	}
	return b.start(ctx, func() (VM, error) { return bring(ctx, n, from, o) })
}

// bring starts a VM from a rollout's step (ROLLOUT@LINE), an image or, if there is
// none of that name, from a snapshot.
func bring(ctx context.Context, n Node, from string, o node.Options) (VM, error) {
	if !strings.Contains(from, "@") {
		vm, err := n.Boot(ctx, from, o)
		if !failure.Is(err, failure.ImageNotFound) {
			return vm, err
		}
		if _, missing := n.InspectSnapshot(from); missing != nil {
			return nil, err
		}
	}
	if o.CPUs != defaultCPUs || o.MemoryBytes != defaultMemory || o.CommandLine != "" {
		return nil, usagef("--cpus, --memory, --kernel-args: a VM from a snapshot has what the snapshot had")
	}
	return n.Restore(ctx, from, o)
}

// whileItLives does something with a VM, and ends it.
func (a *app) whileItLives(ctx context.Context, vm VM, remove bool, do func(context.Context, VM) error) error {
	err := do(ctx, vm)
	if cleanup := end(ctx, vm, remove); cleanup != nil {
		if err == nil {
			return cleanup
		}
		// The command's outcome is what counts, but this is said, too.
		fmt.Fprintf(a.Stderr, "forkvm: %s\n", output.Visible(cleanup.Error()))
	}
	return err
}

// end ends a VM, also when the context is cancelled already.
func end(ctx context.Context, vm VM, remove bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if remove {
		return vm.Remove(ctx, true)
	}
	return vm.Kill(ctx)
}

// attach shows the console until the guest's life is over. An orderly end is a
// success.
func (a *app) attach(ctx context.Context, vm VM) error {
	out := io.Writer(a.Stdout)
	if a.format.Machine() {
		out = io.Discard // the result is one object
	}
	if err := a.follow(ctx, vm, out); err != nil {
		return err
	}
	exit, err := vm.Wait(ctx)
	if err != nil {
		return err
	}
	if err := endCode(exit); err != nil {
		return a.commandFailed(vm, err)
	}
	if a.format.Machine() {
		return output.WriteObject(a.Stdout, a.format, execView{Schema: execSchema, VM: nameOf(vm)})
	}
	return nil
}

// endCode is how a run without a command ends: well if the guest turned itself
// off, like a killed process if somebody killed the VM.
func endCode(exit *vmm.Exit) error {
	switch exit.Reason {
	case vmm.ReasonShutdown, vmm.ReasonReset:
		return nil
	case vmm.ReasonKilled:
		return exitCode(exitKilled)
	}
	return failure.New(failure.GuestEnded, "%w", exit)
}
