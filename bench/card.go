package bench

import (
	"context"
	"errors"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/node"
)

// cardSnapshot is the standard guest with a network card.
const cardSnapshot = "card"

// card measures what a network card adds to creates, and what it takes to change what a guest may reach.
func (b *bench) card(ctx context.Context) (err error) {
	if err := b.scene.freezeCard(ctx); err != nil {
		return err
	}
	restore, err := passOn()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	waiting := func(backend node.Backend) func() error {
		return b.waitFor(ctx, node.Waiting{Count: 1, CPUs: 1, Backend: backend})
	}
	rehearsed := func(backend node.Backend) func() error {
		return b.waitFor(ctx, node.Waiting{Count: 1, Snapshot: cardSnapshot, Backend: backend})
	}
	for _, with := range []struct {
		row, what string
		backend   node.Backend
		prepare   func() error
	}{
		{"create_card", "create with a network card", node.BackendUser, nil},
		{"create_card_ready", "create with a network card, ready process waiting", node.BackendUser, waiting(node.BackendUser)},
		{"create_card_rehearsed", "create with a network card, process waiting that has rehearsed", node.BackendUser, rehearsed(node.BackendUser)},
		{"create_tap", "create with a network card and a TAP device", node.BackendTap, nil},
		{"create_tap_ready", "create with a network card and a TAP device, ready process waiting with both", node.BackendTap, waiting(node.BackendTap)},
		{"create_tap_rehearsed", "create with a network card and a TAP device, process waiting that has rehearsed", node.BackendTap, rehearsed(node.BackendTap)},
	} {
		c, err := b.createsFrom(ctx, cardSnapshot, b.config.Creates, node.Options{Backend: with.backend}, with.prepare)
		if err != nil {
			return err
		}
		b.row(with.row, CMS, c.ready)
		b.row(with.row+"_first_command", CMS, c.command)
		b.phases = append(b.phases, c.course.breakdown(with.what))
	}
	vm, err := b.scene.node.Restore(ctx, cardSnapshot, node.Options{})
	if err == nil {
		err = errors.Join(b.policies(ctx, vm), remove(ctx, vm))
	}
	return err
}

// cardClones measures what idle clones of such a guest have of their own.
func (b *bench) cardClones(ctx context.Context) error {
	if err := b.scene.freezeCard(ctx); err != nil {
		return err
	}
	vms, err := b.idle(ctx, cardSnapshot, children)
	if err == nil {
		b.row("clone_card_private", MiB, held(vms))
	}
	return errors.Join(err, remove(ctx, vms...))
}

// freezeCard makes cardSnapshot, once.
func (s *scene) freezeCard(ctx context.Context) error {
	if s.card {
		return nil
	}
	vm, err := s.node.Boot(ctx, imageName, node.Options{CPUs: 1, MemoryBytes: standardMemory, Network: &policy.Policy{Mode: policy.NoNetwork}})
	if err != nil {
		return err
	}
	for range 3 {
		err = errors.Join(err, run(ctx, vm, "true"))
	}
	time.Sleep(settle)
	if err == nil {
		_, err = vm.Snapshot(ctx, cardSnapshot, "")
	}
	if err = errors.Join(err, remove(ctx, vm)); err != nil {
		return err
	}
	_, err = s.firstCreates(ctx, cardSnapshot)
	s.card = err == nil
	return err
}

// policies measures changes of a policy, to and fro.
func (b *bench) policies(ctx context.Context, vm *node.VM) error {
	allowed := []string{"*.example.org:443", "10.1.0.0/16:5432", "packages.example.net"}
	next := policy.Policy{Mode: policy.Public}
	samples, err := repeat(b.config.Rounds, func() error {
		p := next
		if next = (policy.Policy{Mode: policy.Public}); p.Mode == policy.Public {
			next = policy.Policy{Mode: policy.Allowlist, Allow: allowed}
		}
		return vm.SetNetwork(ctx, p)
	})
	if err != nil {
		return err
	}
	b.row("set_network", CMS, samples)
	return nil
}
