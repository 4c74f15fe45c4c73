package process

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// Options say what a VM process can do beside what every one can.
type Options struct {
	// Network makes the network behind a guest's card. A network stack is heavy, and every process pays for what its program
	// has in it: nil is for a program that runs machines without a card only.
	Network func(card machine.MAC, mtu int, rules *policy.Rules, c NetworkConfig) (machine.Network, error)
}

// makeNetwork makes the network of a machine with a card, and says which address that has.
func (s *server) makeNetwork(form *startForm, mtu int) (n machine.Network, card machine.MAC, err error) {
	switch {
	case (form.Tap != nil) != (s.tap != nil):
		return nil, card, errors.New("the process was made for another network")
	case s.tap == nil && s.options.Network == nil:
		return nil, card, errors.New("this program has no network for a machine with a card")
	}
	rules, err := form.Network.Policy.Compile()
	if err != nil {
		return nil, card, failure.As(failure.InvalidArgument, err)
	}
	if card, err = form.Identity.CardAddress(); err != nil {
		return nil, card, err
	}
	if form.Tap != nil {
		n, err = s.makeTap(card, rules, *form.Tap)
		return n, card, err
	}
	n, err = s.options.Network(card, mtu, rules, *form.Network)
	if errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EACCES) {
		err = failure.As(failure.InvalidArgument, err) // of a published port
	}
	return n, card, err
}

// network says what the network has seen.
func (s *server) network() response {
	status, err := s.machine.NetworkStatus()
	if err != nil {
		return response{Error: s.explain(err)}
	}
	refused := s.unreported.take(&status.Status)
	return response{Network: &status, Refused: &refused}
}

// setPolicy replaces the policy and says what is new of what the guest was refused.
func (s *server) setPolicy(p *policy.Policy) response {
	rules, err := p.Compile()
	if err != nil {
		return response{Error: failure.As(failure.InvalidArgument, err)}
	}
	if err := s.machine.SetPolicy(rules); err != nil {
		return response{Error: s.explain(err)}
	}
	return s.refused()
}

// SetPolicy replaces what the guest may reach, from now on, and returns what Refusals does.
func (c *Client) SetPolicy(ctx context.Context, p *policy.Policy) (refused journal.Refused, err error) {
	return c.refused(ctx, request{Op: opNetwork, Policy: p})
}

// Network returns what the guest's network has seen, and, as Refusals, what is new of what it was refused.
func (c *Client) Network(ctx context.Context) (status *machine.NetworkStatus, refused journal.Refused, err error) {
	resp, files, err := c.call(ctx, request{Op: opNetwork}, nil)
	linux.CloseFiles(files...)
	if err != nil {
		return nil, refused, err
	}
	if resp.Network == nil {
		return nil, refused, failure.New(failure.Internal, "vm process said nothing of its network")
	}
	if resp.Refused != nil {
		refused = *resp.Refused
	}
	return resp.Network, refused, nil
}
