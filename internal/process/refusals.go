package process

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// unreported tells what was refused since it was asked last.
type unreported struct {
	mu    sync.Mutex
	total uint64
	seen  map[policy.Refusal]uint64 // how often, by what was refused
}

// take returns what is new in a network's status, and remembers that it was told. The status has the latest; of what it has
// forgotten the number is known.
func (u *unreported) take(s *policy.Status) (r journal.Refused) {
	u.mu.Lock()
	defer u.mu.Unlock()
	r.Others = s.Refused - u.total
	seen := make(map[policy.Refusal]uint64, len(s.Refusals))
	for _, one := range slices.Backward(s.Refusals) {
		what := one
		what.Count, what.Last = 0, time.Time{}
		seen[what] = one.Count
		if before := u.seen[what]; before < one.Count {
			one.Count -= before
		} else if before == one.Count {
			continue
		}
		r.Refusals = append(r.Refusals, one)
		r.Others -= min(one.Count, r.Others)
	}
	u.total, u.seen = s.Refused, seen
	return r
}

// refusals returns what the guest was refused since it was asked last.
func (s *server) refusals() (r journal.Refused, err error) {
	status, err := s.machine.NetworkStatus()
	if err == nil {
		r = s.unreported.take(&status.Status)
	}
	return r, err
}

// refused answers with refusals.
func (s *server) refused() response {
	r, err := s.refusals()
	if err != nil {
		return response{Error: s.explain(err)}
	}
	return response{Refused: &r}
}

// leaveRefusals leaves in the process's own directory what nobody has asked for.
func (s *server) leaveRefusals() error {
	r, err := s.refusals()
	if errors.Is(err, machine.ErrNoCard) || err == nil && r.Empty() {
		return nil
	}
	if err == nil {
		err = s.directory.write(refusalsFile, r)
	}
	return err
}

// Refusals returns what the guest was refused since somebody asked last. Whoever asks is to put it on record.
func (c *Client) Refusals(ctx context.Context) (journal.Refused, error) {
	return c.refused(ctx, request{Op: opRefusals})
}

// refused makes a call that is answered with what the guest was refused.
func (c *Client) refused(ctx context.Context, req request) (r journal.Refused, err error) {
	resp, files, err := c.call(ctx, req, nil)
	linux.CloseFiles(files...)
	if err == nil && resp.Refused != nil {
		r = *resp.Refused
	}
	return r, err
}

// TakeRefusals returns what a VM that has ended has left of its refusals, once.
func TakeRefusals(directory string) (r journal.Refused, err error) {
	err = readOwn(directory, refusalsFile, &r)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err == nil {
		err = os.Remove(own(directory, refusalsFile))
	}
	return r, err
}
