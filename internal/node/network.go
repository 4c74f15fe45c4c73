package node

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

// resolvPath names the host's resolvers.
const resolvPath = "/etc/resolv.conf"

// cardMTU is the MTU of the card of a VM that is booted, 0 if it gets none.
func (o *Options) cardMTU() int {
	switch {
	case o.Network == nil && len(o.Ports) == 0:
		return 0
	case o.NetworkMTU == 0:
		return machine.DefaultMTU
	}
	return o.NetworkMTU
}

// card is what a VM's guest may reach through its network card, if it has one.
type card struct {
	network *process.NetworkConfig // nil without a card
	rules   *policy.Rules          // its policy's
	pass    passage                // with a TAP device
}

// card is that of a VM of this shape. What it cannot have is an error.
func (o *Options) card(s machine.Shape) (c card, err error) {
	if c.network, c.rules, err = o.network(s); err == nil && c.network != nil && o.Backend == BackendTap {
		c.pass, err = o.tapPassage(c.network, c.rules)
	}
	return c, err
}

// give has the draft's VM get a card.
func (d *draft) give(c card, o *Options) {
	if c.network != nil {
		d.record.Network, d.record.Ports = &c.network.Policy, c.network.Ports
		d.card, d.enforce, d.backend = c, o.Enforce, o.Backend
	}
}

// network is what is behind the card of a VM of this shape, nil if it has none.
func (o *Options) network(s machine.Shape) (*process.NetworkConfig, *policy.Rules, error) {
	if s.NetworkMTU == 0 {
		if o.Network != nil || len(o.Ports) > 0 {
			return nil, nil, failure.New(failure.InvalidArgument, "a network policy and published ports are for a vm with a network card: this one was made without")
		}
		return nil, nil, nil
	}
	if err := policy.CheckPorts(o.Ports); err != nil {
		return nil, nil, failure.As(failure.InvalidArgument, err)
	}
	c := &process.NetworkConfig{Policy: policy.Policy{Mode: policy.NoNetwork}, Resolvers: hostResolvers(resolvPath), Ports: o.Ports}
	if o.Network != nil {
		c.Policy = *o.Network
	}
	rules, err := c.Policy.Compile()
	if err != nil {
		return nil, nil, failure.As(failure.InvalidArgument, err)
	}
	return c, rules, nil
}

// maxResolvers is how many lines of resolv.conf count (resolv.conf(5)).
const maxResolvers = 3

// hostResolvers reads the host's resolvers. Without any, guests resolve no names.
func hostResolvers(path string) (list []netip.AddrPort) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan() && len(list) < maxResolvers; {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			list = append(list, netip.AddrPortFrom(a, 53))
		}
	}
	return list
}

// command starts a VM process, one with a network stack or one without, and says which build of a program it is.
func (n *Node) command(networked bool) (command []string, program string, err error) {
	if !networked && n.program == "" {
		return nil, "", failure.New(failure.Internal, "a vm needs the program %s, which is not there", n.config.Command[0])
	}
	if !networked {
		return n.config.Command, n.program, nil
	}
	if len(n.config.NetworkCommand) == 0 {
		return nil, "", failure.New(failure.InvalidArgument, "this program makes no vms with a network card")
	}
	path := n.config.NetworkCommand[0]
	if _, err := os.Stat(path); err != nil {
		return nil, "", failure.New(failure.Internal, "a vm with a network card needs the program %s: %w", path, err)
	}
	return n.config.NetworkCommand, programID(path), nil
}

// SetNetwork replaces what the VM may reach, from now on: connections that are not allowed any more end.
func (vm *VM) SetNetwork(ctx context.Context, p policy.Policy) error {
	rules, err := p.Compile()
	if err != nil {
		return failure.As(failure.InvalidArgument, err)
	}
	var refused journal.Refused // most of it by the policy before
	err = vm.change(ctx, func(r *Record) error {
		if r.Network == nil {
			return failure.New(failure.InvalidArgument, "vm %s has no network card", r.Name)
		}
		r.Network = &p
		// The process is on the line before the kernel is asked: it wakes up while the kernel waits for itself.
		return vm.call(ctx, func(c *process.Client, ctx context.Context) error {
			// The kernel first: what it has refused since then stays refused, whatever the VM's process answers.
			err := vm.setKernelPolicy(p, rules)
			if err == nil {
				refused, err = c.SetPolicy(ctx, &p)
			}
			return err
		})
	})
	if err != nil || !vm.recorded() {
		return err
	}
	before := vm.noteRefused(refused)
	_, err = vm.rollout().Note(journal.EventNetwork, p)
	return errors.Join(before, err)
}

// NetworkStatus says what the VM's network has seen.
func (vm *VM) NetworkStatus(ctx context.Context) (status *machine.NetworkStatus, err error) {
	if vm.Network == nil {
		return nil, failure.New(failure.InvalidArgument, "vm %s has no network card", vm.Name)
	}
	var refused journal.Refused
	err = vm.call(ctx, func(c *process.Client, ctx context.Context) error {
		status, refused, err = c.Network(ctx)
		return err
	})
	if err == nil && vm.recorded() {
		err = vm.noteRefused(refused)
	}
	return status, err
}
