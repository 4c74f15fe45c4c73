package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/vmm"
)

// maxWaiting is the largest number of processes that prepare leaves.
const maxWaiting = 1000

// waitingView is what prepare prints.
type waitingView struct {
	Schema string `json:"schema"`
	// Waiting is how many processes wait for a VM with CPUs vCPUs, or for one of the
	// snapshot; for any VM when there is neither.
	Waiting  int    `json:"waiting"`
	CPUs     int    `json:"cpus,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	// NetworkBackend and MTU are of the VMs' network card, as they were asked for.
	NetworkBackend node.Backend `json:"network_backend,omitempty"`
	MTU            int          `json:"mtu,omitempty"`
}

func (a *app) prepareVerb() *cobra.Command {
	var w node.Waiting
	cmd := &cobra.Command{
		Use:   "prepare [flags]",
		Short: "Start the processes of future VMs",
		Long: "Starts processes that already have a virtual machine and wait. The next VMs with\n" +
			"as many vCPUs use them up, one each, and start the faster for it. With --snapshot\n" +
			"they have been a VM of the snapshot already, for a moment, and wait for the next\n" +
			"ones of it, which start in a fraction of the time. With --network-backend they\n" +
			"are for VMs with such a network card, and have what guards that already: nothing\n" +
			"is let pass until a VM has its policy. A snapshot's card has usernet unless that\n" +
			"says otherwise. The count is how many wait afterwards; with 0 and nothing else\n" +
			"all are ended.",
		Example: "  forkvm prepare --count 16\n" +
			"  forkvm prepare --count 16 --snapshot base\n" +
			"  forkvm prepare --count 16 --network-backend tap\n" +
			"  forkvm prepare --count 16 --network-backend tap --snapshot web\n" +
			"  forkvm prepare --count 0",
		Args: needs(),
	}
	cmd.Flags().IntVarP(&w.Count, "count", "n", 1, fmt.Sprintf("how many wait afterwards, 0 to %d", maxWaiting))
	cmd.Flags().IntVar(&w.CPUs, "cpus", defaultCPUs, fmt.Sprintf("vCPUs of the VMs, 1 to %d", vmm.MaxCPUs))
	cmd.Flags().StringVar(&w.Snapshot, "snapshot", "", "snapshot of which the VMs are made")
	cmd.Flags().Var(choice[node.Backend]{&w.Backend, []node.Backend{node.BackendUser, node.BackendTap}}, "network-backend", "what is behind the VMs' network card; without, they have none, or usernet if the snapshot has one")
	cmd.Flags().IntVar(&w.NetworkMTU, "mtu", machine.DefaultMTU, fmt.Sprintf("size of the largest packet of a network card with a TAP device, %d to %d", machine.MinMTU, machine.MaxMTU))
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, _ []string) error {
		if w.Count < 0 || w.Count > maxWaiting {
			return usagef("--count %d: 0 to %d are possible", w.Count, maxWaiting)
		}
		if w.CPUs < 1 || w.CPUs > vmm.MaxCPUs {
			return usagef("--cpus %d: 1 to %d are possible", w.CPUs, vmm.MaxCPUs)
		}
		if err := checkWaitingMTU(&w, cmd.Flags().Changed("mtu")); err != nil {
			return err
		}
		switch said := cmd.Flags().Changed("cpus"); {
		case said && w.Snapshot != "":
			return usagef("--cpus and --snapshot: a VM has as many as its snapshot")
		case w.Snapshot != "", w.Count == 0 && w.Backend == "" && !said:
			w.CPUs = 0
		}
		waiting, err := n.Prepare(ctx, w)
		if err != nil {
			return err
		}
		if a.format.Machine() {
			return output.WriteObject(a.Stdout, a.format, waitingView{"forkvm/waiting/v1", waiting, w.CPUs, w.Snapshot, w.Backend, w.NetworkMTU})
		}
		_, err = fmt.Fprintln(a.Stdout, waiting)
		return err
	})
	return a.withOutput(cmd)
}

// checkWaitingMTU leaves a size of packets only for the network cards whose processes it matters to.
func checkWaitingMTU(w *node.Waiting, given bool) error {
	if w.Backend != node.BackendTap || w.Snapshot != "" {
		if given {
			return usagef("--mtu: is for --network-backend tap; other processes wait for cards of any, or of a snapshot's")
		}
		w.NetworkMTU = 0
		return nil
	}
	return checkMTU(w.NetworkMTU)
}
