package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/vmm"
)

// maxWaiting is the largest number of processes that prepare leaves.
const maxWaiting = 1000

// waitingView is what prepare prints.
type waitingView struct {
	Schema string `json:"schema"`
	// Waiting is how many processes wait for a VM with CPUs vCPUs; for any VM when
	// there is no such number.
	Waiting int `json:"waiting"`
	CPUs    int `json:"cpus,omitempty"`
}

func (a *app) prepareVerb() *cobra.Command {
	var count, cpus int
	cmd := &cobra.Command{
		Use:   "prepare [flags]",
		Short: "Start the processes of future VMs",
		Long: "Starts processes that already have a virtual machine and wait. The next VMs with\n" +
			"as many vCPUs use them up, one each, and start the faster for it. The count is\n" +
			"how many wait afterwards; with 0 and no --cpus all are ended.",
		Example: "  forkvm prepare --count 16\n" +
			"  forkvm prepare --count 0",
		Args: needs(),
	}
	cmd.Flags().IntVarP(&count, "count", "n", 1, fmt.Sprintf("how many wait afterwards, 0 to %d", maxWaiting))
	cmd.Flags().IntVar(&cpus, "cpus", defaultCPUs, fmt.Sprintf("vCPUs of the VMs, 1 to %d", vmm.MaxCPUs))
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, _ []string) error {
		if count < 0 || count > maxWaiting {
			return usagef("--count %d: 0 to %d are possible", count, maxWaiting)
		}
		if cpus < 1 || cpus > vmm.MaxCPUs {
			return usagef("--cpus %d: 1 to %d are possible", cpus, vmm.MaxCPUs)
		}
		if count == 0 && !cmd.Flags().Changed("cpus") {
			cpus = 0
		}
		waiting, err := n.Prepare(ctx, cpus, count)
		if err != nil {
			return err
		}
		if a.format.Machine() {
			return output.WriteObject(a.Stdout, a.format, waitingView{Schema: "forkvm/waiting/v1", Waiting: waiting, CPUs: cpus})
		}
		_, err = fmt.Fprintln(a.Stdout, waiting)
		return err
	})
	return a.withOutput(cmd)
}
