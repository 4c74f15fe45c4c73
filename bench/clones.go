package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/node"
)

// Clones of a small guest: one vCPU and so much RAM.
const smallMemory = 128 << 20

// batch is how many clones make a line of the table.
const batch = 100

// reserve is what has to be left of the host's memory, in bytes.
const reserve = 1 << 30

// Clones starts as many clones of one snapshot as asked for, or as the host has
// memory for, and keeps them all. It prints a line for each hundred, and at the
// end lets each run a command.
func Clones(ctx context.Context, c SceneConfig, want int, w io.Writer) (err error) {
	s, err := newScene(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	name, err := s.snapshot(ctx, smallMemory)
	if err != nil {
		return err
	}
	before, err := available()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%8s  %15s  %12s  %20s  %21s\n", "clones", "create p50, cms", "all, seconds", "private p50/max, MiB", "host memory each, MiB")
	var vms []*node.VM
	var all, first, last float64 // milliseconds for all, and for each of the first and the last batch
	for len(vms) < want {
		p50, took, more, err := s.batch(ctx, name, min(batch, want-len(vms)))
		vms = append(vms, more...)
		if err != nil {
			return err
		}
		left, err := available()
		if err != nil {
			return err
		}
		all, last = all+took, took/float64(len(more))
		if first == 0 {
			first = last
		}
		private := summarize("", MiB, held(more))
		fmt.Fprintf(w, "%8d  %15.2f  %12.2f  %13.2f /%5.2f  %21.2f\n", len(vms), p50, all/1000, private.P50, private.Max,
			float64(before-left)/float64(len(vms))/(1<<20))
		if left < reserve {
			fmt.Fprintln(w, "no more fit: the host's memory is used up")
			break
		}
	}
	fmt.Fprintf(w, "one of the last %d took %.2f times one of the first\n", batch, last/first)
	return answerAll(ctx, vms, w)
}

// batch starts some clones one after the other and lets them settle. It returns
// the median and the sum of what their creates took, in milliseconds.
func (s *scene) batch(ctx context.Context, snapshot string, n int) (p50, all float64, vms []*node.VM, err error) {
	var samples []float64
	for range n {
		begin := time.Now()
		vm, err := s.node.Restore(ctx, snapshot, node.Options{})
		if err != nil {
			return 0, 0, vms, err
		}
		samples = append(samples, ms(time.Since(begin)))
		all += samples[len(samples)-1]
		vms = append(vms, vm)
	}
	time.Sleep(5 * settle)
	return summarize("", CMS, samples).P50, all, vms, nil
}

// held is what the VMs' processes share with nobody, in MiB.
func held(vms []*node.VM) []float64 {
	var samples []float64
	for _, vm := range vms {
		samples = append(samples, float64(linux.PrivateBytes(vm.PID))/(1<<20))
	}
	return samples
}

func answerAll(ctx context.Context, vms []*node.VM, w io.Writer) error {
	for _, vm := range vms {
		if err := run(ctx, vm, "true"); err != nil {
			return fmt.Errorf("clone %s: %w", vm.Name, err)
		}
	}
	fmt.Fprintf(w, "all %d clones ran a command\n", len(vms))
	return nil
}
