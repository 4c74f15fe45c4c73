package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/forkvm/forkvm/internal/node"
)

// crowd is how many creates the budget's burst has.
const crowd = 100

// burst compares many creates at once with as many single ones.
func (b *bench) burst(ctx context.Context) error {
	single, err := b.creates(ctx, standardMemory, b.config.Rounds, nil)
	if err != nil {
		return err
	}
	before, err := available()
	if err != nil {
		return err
	}
	var vms []*node.VM
	took, executed, err := watch(func() (err error) {
		vms, err = b.together(ctx, crowd)
		return err
	})
	if err != nil {
		return errors.Join(err, remove(ctx, vms...))
	}
	b.phases = append(b.phases, executed.breakdown("create, by who executes", crowd))
	time.Sleep(5 * settle)
	after, err := available()
	if err := errors.Join(err, remove(ctx, vms...)); err != nil {
		return err
	}
	b.row("burst100_ratio", Ratio, []float64{ms(took) / (crowd * summarize("", CMS, single.ready).P50)})
	b.row("burst100_total", CMS, []float64{ms(took)})
	// Beside clone_private, which is what processes hold: all that the host has
	// less of, its own tables included.
	b.row("clone_host_memory", MiB, []float64{float64(before-after) / crowd / (1 << 20)})
	return nil
}

// together starts so many VMs from the standard snapshot at once and returns when
// every guest agent has answered.
func (b *bench) together(ctx context.Context, n int) (vms []*node.VM, err error) {
	name, err := b.scene.snapshot(ctx, standardMemory)
	if err != nil {
		return nil, err
	}
	vms, errs := make([]*node.VM, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { vms[i], errs[i] = b.scene.node.Restore(ctx, name, node.Options{}) })
	}
	all.Wait()
	return vms, errors.Join(errs...)
}

// available is the host's estimate of the memory that programs can still have,
// in bytes.
func available() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		var kilobytes int64
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kilobytes); n == 1 {
			return kilobytes << 10, nil
		}
	}
	return 0, errors.New("/proc/meminfo has no MemAvailable")
}
