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

// lull is how long clones are watched that have nothing to do.
const lull = 10 * time.Second

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
	fmt.Fprintf(w, "%8s  %15s  %14s  %20s  %12s  %20s  %21s\n", "clones", "create p50, cms", "idlers' of it", "who: guest/kernel/us",
		"all, seconds", "private p50/max, MiB", "host memory each, MiB")
	var vms []*node.VM
	var all float64 // milliseconds
	var first, last hundred
	for len(vms) < want {
		last, err = s.hundred(ctx, name, min(batch, want-len(vms)), last.idle)
		vms = append(vms, last.vms...)
		if err != nil {
			return err
		}
		left, err := available()
		if err != nil {
			return err
		}
		all += last.all
		if first.vms == nil {
			first = last
		}
		private, who := summarize("", MiB, held(last.vms)), last.executed
		fmt.Fprintf(w, "%8d  %15.2f  %14.2f  %6.1f/%6.1f/%6.1f  %12.2f  %13.2f /%5.2f  %21.2f\n", len(vms), last.p50, last.idlers(),
			last.each(who.guest), last.each(who.kernel), last.each(who.ours), all/1000, private.P50, private.Max,
			float64(before-left)/float64(len(vms))/(1<<20))
		if left < reserve {
			fmt.Fprintln(w, "no more fit: the host's memory is used up")
			break
		}
	}
	fmt.Fprintf(w, "one of the last %d took %.2f times one of the first, %.2f times without what idle clones did meanwhile\n", batch,
		last.each(last.all)/first.each(first.all), (last.each(last.all)-last.idlers())/(first.each(first.all)-first.idlers()))
	for _, h := range []struct {
		name string
		hundred
	}{{"first", first}, {"last", last}} {
		if err := h.course.breakdown("create, of the " + h.name).print(w); err != nil {
			return err
		}
	}
	return answerAll(ctx, vms, w)
}

// hundred is what it took to make some clones, one after the other.
type hundred struct {
	vms      []*node.VM
	p50, all float64 // milliseconds: the median, and the sum
	course   course
	executed executed
	// busy is the share of the processor that all clones took that were there before
	// and idle is that share behind these creates.
	busy, idle float64
}

// each is the share of one clone.
func (h *hundred) each(of float64) float64 { return of / float64(len(h.vms)) }

// idlers is what of one create's milliseconds the clones took that were there already.
func (h *hundred) idlers() float64 { return (h.busy + h.idle) / 2 * h.each(h.all) }

// hundred starts n clones and lets them settle. busy is the share of the processor
// that the clones so far take.
func (s *scene) hundred(ctx context.Context, snapshot string, n int, busy float64) (h hundred, err error) {
	h.busy = busy
	var samples []float64
	_, h.executed, err = watch(func() error {
		for range n {
			begin := time.Now()
			vm, err := s.node.Restore(ctx, snapshot, node.Options{})
			if err != nil {
				return err
			}
			took := time.Since(begin)
			samples, h.all = append(samples, ms(took)), h.all+ms(took)
			h.course.add(vm.Phases, took)
			h.vms = append(h.vms, vm)
		}
		return nil
	})
	if err != nil {
		return h, err
	}
	h.p50 = summarize("", CMS, samples).P50
	time.Sleep(5 * settle)
	h.idle, err = used(lull)
	return h, err
}

// held is what the VMs' processes share with nobody, in MiB.
func held(vms []*node.VM) []float64 {
	var samples []float64
	for _, vm := range vms {
		samples = append(samples, privateMiB(vm.PID))
	}
	return samples
}

func privateMiB(pid int) float64 { return float64(linux.PrivateBytes(pid)) / (1 << 20) }

func answerAll(ctx context.Context, vms []*node.VM, w io.Writer) error {
	for _, vm := range vms {
		if err := run(ctx, vm, "true"); err != nil {
			return fmt.Errorf("clone %s: %w", vm.Name, err)
		}
	}
	fmt.Fprintf(w, "all %d clones ran a command\n", len(vms))
	return nil
}
