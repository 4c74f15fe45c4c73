package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/internal/tapnet"
)

// Backend is what is behind a VM's network card.
type Backend string

// The backends.
const (
	// BackendUser is a network stack in the VM's process.
	BackendUser Backend = "usernet"
	// BackendTap is a TAP device in a network namespace of the VM's own: the kernel does all of it.
	BackendTap Backend = "tap"
)

// Networks with a TAP are on record like control groups, out of the reach of VM processes.
func (n *Node) tapFile(id string) string { return filepath.Join(n.groupsDir(), id+".tap") }

// tap is the record of the network of a VM, nil if that has no TAP.
func (n *Node) tap(id string) (*tapnet.Record, error) {
	data, err := os.ReadFile(n.tapFile(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var r tapnet.Record
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("read record of network (%s): %w", id, err))
	}
	return &r, nil
}

// backend is what is behind the card of a VM, or of one for which a process waits, if it has one.
func (n *Node) backend(id string) Backend {
	if exists(n.tapFile(id)) {
		return BackendTap
	}
	return BackendUser
}

// onTap calls do with the VM's network, if that has a TAP.
func (vm *VM) onTap(do func(*tapnet.Control) error) error {
	id := filepath.Base(vm.dir)
	r, err := vm.node.tap(id)
	if r == nil {
		return err
	}
	c, err := tapnet.Open(id, *r)
	if err != nil {
		return failure.As(failure.VMProcessGone, err)
	}
	defer c.Close()
	return failureOf(do(c))
}

// Backend is what is behind the VM's network card, if it has one.
func (vm *VM) Backend() Backend { return vm.node.backend(filepath.Base(vm.dir)) }

const noNames = "a network card with a TAP device knows addresses only: name those, or use --network-backend usernet"

// passage is what a guest with a TAP device is let do.
type passage struct {
	policy tapnet.Policy
	host   []netip.Addr // addresses that it does not reach
}

// throughTap is what the programs at a TAP are to allow of a policy, which has these rules. What they cannot is an error.
func throughTap(p policy.Policy, rules *policy.Rules) (pass passage, err error) {
	err = p.CheckAddresses(noNames)
	if err == nil && (p.Limits.Connections != 0 || p.Limits.Sessions != 0) {
		err = errors.New("read network policy: a network card with a TAP device has no limits of connections and sessions of its own: leave them out, or use --network-backend usernet")
	}
	if err != nil {
		return pass, failure.As(failure.InvalidArgument, err)
	}
	if pass.host, err = linux.HostAddresses(); err != nil {
		return pass, failure.As(failure.Internal, err)
	}
	regions := rules.Regions(policy.Surroundings{Host: pass.host})
	for _, r := range regions {
		if r.Local {
			return pass, failure.New(failure.InvalidArgument,
				"read network policy: allow %s: is of this host, which a VM with a TAP device does not reach: use --network-backend usernet", r.Prefix)
		}
	}
	pass.policy = tapnet.Policy{Regions: regions, Names: rules.Mode() == policy.Public, Rate: p.Limits.Rate, Bytes: p.Limits.Bytes, Packets: p.Limits.Packets}
	return pass, nil
}

// tapPassage is that of the VM's guest. What a card with a TAP device cannot have is an error.
func (o *Options) tapPassage(c *process.NetworkConfig, rules *policy.Rules) (passage, error) {
	if len(c.Ports) > 0 {
		return passage{}, failure.New(failure.InvalidArgument, "publish port %v: not with a TAP device: use --network-backend usernet", c.Ports[0])
	}
	if o.Enforce == EnforceUser {
		return passage{}, failure.New(failure.InvalidArgument, "--network-enforce user: the policy of a card with a TAP device is always enforced by the kernel")
	}
	return throughTap(c.Policy, rules)
}

// tapConfig is the network of the draft's process.
func (d *draft) tapConfig(mtu int) tapnet.Config {
	return tapnet.Config{Name: d.record.ID, MTU: mtu, Resolver: firstResolver4(hostResolvers(resolvPath))}
}

// makeTap makes the network of the draft's process, in which nothing is allowed yet.
func (d *draft) makeTap(mtu int) (*tapnet.Network, error) {
	network, err := tapnet.Create(d.tapConfig(mtu))
	if err != nil {
		return nil, tapFailure(err)
	}
	d.record.Enforcement = &Enforcement{By: EnforceKernel}
	data, err := json.Marshal(network.Record)
	if err == nil {
		err = os.WriteFile(d.node.tapFile(d.record.ID), append(data, '\n'), 0o600)
	}
	if err == nil {
		d.tap, err = tapnet.Open(d.record.ID, network.Record)
	}
	if err != nil {
		network.Close()
		return nil, err
	}
	d.tapRecord = network.Record
	return network, nil
}

// claimTap takes the network of a process that waits.
func (d *draft) claimTap(mtu int) error {
	r, err := d.node.tap(d.record.ID)
	if err != nil || r == nil {
		return tapnet.ErrGone // or nobody finds it
	}
	d.tapRecord = *r
	if d.tap, err = tapnet.Claim(d.tapConfig(mtu), *r); err != nil {
		return tapFailure(err)
	}
	return nil
}

func tapFailure(err error) error {
	var unavailable *tapnet.UnavailableError
	if errors.As(err, &unavailable) {
		return failure.New(failure.NetworkUnavailable, "%w; or go without, with --network-backend usernet", err)
	}
	return err
}

// firstResolver4 is the one that a VM's namespace passes queries on to.
func firstResolver4(list []netip.AddrPort) netip.AddrPort {
	for _, r := range list {
		if r.Addr().Is4() && !r.Addr().IsLoopback() {
			return r
		}
	}
	return netip.AddrPort{}
}

// admitToTap lets the draft's guest use its network.
func (d *draft) admitToTap(c *process.StartConfig) error {
	card, err := d.record.Identity.CardAddress()
	if err == nil {
		err = d.tap.Admit(d.record.space, card, d.pass.policy)
	}
	if err != nil {
		return err
	}
	c.Tap = d.tapAddressing()
	c.Tap.Host = d.pass.host
	return nil
}

// tapAddressing is what is on the link of the draft's network.
func (d *draft) tapAddressing() *process.TapConfig {
	return &process.TapConfig{Names: d.tapRecord.Names(), IPv6: d.tapRecord.IPv6}
}

// space opens the network namespace of the VM's process.
func (r *Record) space() (*os.File, error) {
	return os.Open(filepath.Join("/proc", strconv.Itoa(r.PID), "ns/net"))
}

// duringReset has the VM's network, if that has a TAP, forget what it knows of the guest and let nothing pass until do is done.
func (vm *VM) duringReset(r *Record, do func() error) error {
	if err := vm.onTap(func(c *tapnet.Control) error { return c.Suspend(r.space) }); err != nil {
		return err
	}
	if err := do(); err != nil {
		_ = vm.onTap((*tapnet.Control).Resume) // the VM has ended, if it was not refused
		return err
	}
	return vm.onTap((*tapnet.Control).Resume)
}
