package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
)

// statsTimeout bounds how long a guest may take to answer.
const statsTimeout = 10 * time.Second

// statsView is what a VM uses, on the host and by its own account.
type statsView struct {
	Schema string  `json:"schema"`
	VM     *vmName `json:"vm"`
	// PrivateBytes is memory that the VM's process shares with nobody.
	PrivateBytes int64          `json:"private_bytes"`
	Guest        *client.Usage  `json:"guest,omitempty"`
	Network      *networkUse    `json:"network,omitempty"`
	Error        *failure.Error `json:"error,omitempty"`
}

// networkUse is what a VM with a network card has of the host's network.
type networkUse struct {
	Connections   int    `json:"connections"`
	Sessions      int    `json:"sessions"`
	SentBytes     uint64 `json:"sent_bytes"`
	ReceivedBytes uint64 `json:"received_bytes"`
	Refused       uint64 `json:"refused"`
}

func (a *app) statsVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "stats [flags] [VM...]",
		Short: "Show what VMs use now, and whether their guests answer",
		Args:  cobra.ArbitraryArgs,
	}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, refs []string) error {
		vms, failed := a.named(n, refs)
		if len(refs) == 0 {
			var err error
			if vms, err = n.List(); err != nil {
				return err
			}
		}
		all, run := make([]statsView, len(vms)), make([]bool, len(vms))
		var asked sync.WaitGroup
		for i, vm := range vms {
			asked.Go(func() { all[i], run[i] = measure(ctx, vm) })
		}
		asked.Wait()
		var views []statsView
		for i, v := range all {
			if len(refs) == 0 && !run[i] {
				continue // its guest could not answer
			}
			if views = append(views, v); v.Error != nil && len(refs) > 0 {
				failed = exitCode(exitFailure)
			}
		}
		return errors.Join(show(a, statsList(views)), failed)
	})
	a.withTemplate(cmd)
	return a.withOutput(cmd)
}

// named finds VMs, and complains of those that are not there.
func (a *app) named(n Node, refs []string) (vms []VM, failed error) {
	failed = a.each(refs, func(ref string) error {
		vm, err := n.Find(ref)
		if err == nil {
			vms = append(vms, vm)
		}
		return err
	})
	return vms, failed
}

// measure asks one VM. A guest that does not answer is a result. run says whether the
// VM runs.
func measure(ctx context.Context, vm VM) (v statsView, run bool) {
	v = statsView{Schema: "forkvm/stats/v1", VM: nameOf(vm)}
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	st, err := runningStatus(ctx, vm)
	if err != nil {
		v.Error = explain(err)
		return v, false
	}
	v.PrivateBytes = st.PrivateBytes
	if vm.Record().Network != nil {
		n, err := vm.NetworkStatus(ctx)
		if err != nil {
			v.Error = explain(err)
			return v, true
		}
		v.Network = &networkUse{n.Connections, n.Sessions, n.SentBytes, n.ReceivedBytes, n.Refused}
	}
	usage, err := vm.Guest().Usage(ctx)
	if err != nil {
		v.Error = explain(err)
		return v, true
	}
	v.Guest = &usage
	return v, true
}

func statsList(views []statsView) output.List[statsView] {
	return output.List[statsView]{
		Header: []string{"NAME", "PRIVATE", "MEMORY", "DISK", "LOAD", "BUSY", "TASKS"},
		Row: func(v statsView) []string {
			g := v.Guest
			if g == nil {
				return []string{v.VM.Name, output.Size(v.PrivateBytes), string(v.Error.Code), "", "", "", ""}
			}
			used := func(total, available int64) string {
				return output.Size(total-available) + " of " + output.Size(total)
			}
			return []string{
				v.VM.Name, output.Size(v.PrivateBytes),
				used(g.Memory.TotalBytes, g.Memory.AvailableBytes), used(g.Root.TotalBytes, g.Root.AvailableBytes),
				fmt.Sprintf("%.2f", g.Load1), (time.Duration(g.BusyMS) * time.Millisecond).String(), strconv.Itoa(g.Tasks),
			}
		},
		Name:  func(v statsView) string { return v.VM.Name },
		Items: views,
	}
}
