package bench

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// executed says who used the processors, in milliseconds, as the host's kernel
// has sampled it at each tick of its clock: 250 times a second. It is right for
// what lasts a second or more. How long nobody did is not sampled.
type executed struct{ guest, kernel, ours, idle float64 }

// watch returns how long do took and who executed the work.
func watch(do func() error) (took time.Duration, e executed, err error) {
	before, err := readExecuted()
	if err != nil {
		return 0, e, err
	}
	begin := time.Now()
	err = do()
	took = time.Since(begin)
	after, readErr := readExecuted()
	return took, after.since(before), errors.Join(err, readErr)
}

// used returns the share of the processor that is used in a while in which nothing is
// asked for.
func used(while time.Duration) (float64, error) {
	took, e, err := watch(func() error {
		time.Sleep(while)
		return nil
	})
	return max(0, 1-e.idle/ms(took)), err
}

// tick is the unit of /proc/stat in milliseconds (USER_HZ is 100).
const tick = 10

// readExecuted is since the host's boot.
func readExecuted() (executed, error) {
	data, err := os.ReadFile("/proc/stat")
	if err != nil {
		return executed{}, err
	}
	return parseExecuted(string(data))
}

// parseExecuted reads the first line of /proc/stat (proc_stat(5)): user time
// contains that of guests.
func parseExecuted(stat string) (executed, error) {
	line, _, _ := strings.Cut(stat, "\n")
	var user, nice, system, idle, iowait, irq, softirq, steal, guest, guestNice float64
	_, err := fmt.Sscanf(line, "cpu %f %f %f %f %f %f %f %f %f %f",
		&user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal, &guest, &guestNice)
	if err != nil {
		return executed{}, fmt.Errorf("read /proc/stat: %w", err)
	}
	guests := guest + guestNice
	return executed{
		guest:  guests * tick,
		kernel: (system + irq + softirq) * tick,
		ours:   (user + nice - guests) * tick,
		idle:   (idle + iowait) * tick,
	}, nil
}

func (e executed) since(before executed) executed {
	return executed{e.guest - before.guest, e.kernel - before.kernel, e.ours - before.ours, e.idle - before.idle}
}

func (e executed) plus(more executed) executed {
	return executed{e.guest + more.guest, e.kernel + more.kernel, e.ours + more.ours, e.idle + more.idle}
}

// breakdown divides it among so many things that were done.
func (e executed) breakdown(name string, among int) Breakdown {
	b := Breakdown{Name: name}
	for _, part := range []struct {
		name string
		took float64
	}{{"guest", e.guest}, {"host kernel", e.kernel}, {"forkvm", e.ours}} {
		b.Phases = append(b.Phases, summarize(part.name, CMS, []float64{part.took / float64(among)}))
	}
	return b
}
