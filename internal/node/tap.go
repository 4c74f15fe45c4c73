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
func (n *Node) tap(id string) (*tapnet.Maps, error) {
	data, err := os.ReadFile(n.tapFile(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var maps tapnet.Maps
	if err == nil {
		err = json.Unmarshal(data, &maps)
	}
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("read record of network (%s): %w", id, err))
	}
	return &maps, nil
}

// onTap calls do with the VM's network, if that has a TAP.
func (vm *VM) onTap(do func(*tapnet.Control) error) error {
	id := filepath.Base(vm.dir)
	maps, err := vm.node.tap(id)
	if maps == nil {
		return err
	}
	c, err := tapnet.Open(id, *maps)
	if err != nil {
		return failure.As(failure.VMProcessGone, err)
	}
	defer c.Close()
	return failureOf(do(c))
}

// Backend is what is behind the VM's network card, if it has one.
func (vm *VM) Backend() Backend {
	if maps, _ := vm.node.tap(filepath.Base(vm.dir)); maps != nil {
		return BackendTap
	}
	return BackendUser
}

const noNames = "a network card with a TAP device knows addresses only: name those, or use --network-backend usernet"

// tapPolicy is what the programs at a TAP are to allow. What they cannot is an error.
func tapPolicy(p policy.Policy) (tapnet.Policy, error) {
	rules, err := p.Compile()
	if err == nil {
		err = p.CheckAddresses(noNames)
	}
	if err == nil && p.Limits != (policy.Limits{}) {
		err = errors.New("read network policy: a network card with a TAP device has no limits of its own: leave them out, or use --network-backend usernet")
	}
	if err != nil {
		return tapnet.Policy{}, failure.As(failure.InvalidArgument, err)
	}
	host, err := linux.HostAddresses()
	if err != nil {
		return tapnet.Policy{}, failure.As(failure.Internal, err)
	}
	regions := rules.Regions(policy.Surroundings{Host: host})
	for _, r := range regions {
		if r.Local {
			return tapnet.Policy{}, failure.New(failure.InvalidArgument,
				"read network policy: allow %s: is of this host, which a VM with a TAP device does not reach: use --network-backend usernet", r.Prefix)
		}
	}
	return tapnet.Policy{Regions: regions, Names: rules.Mode() == policy.Public}, nil
}

// makeTap makes the network of the draft's process, in which nothing is allowed yet.
func (d *draft) makeTap(mtu int) error {
	if len(d.network.Ports) > 0 {
		return failure.New(failure.InvalidArgument, "publish port %v: not with a TAP device: use --network-backend usernet", d.network.Ports[0])
	}
	if d.enforce == EnforceUser {
		return failure.New(failure.InvalidArgument, "--network-enforce user: the policy of a card with a TAP device is always enforced by the kernel")
	}
	var err error
	if d.admitted, err = tapPolicy(d.network.Policy); err != nil {
		return err
	}
	d.tap, err = tapnet.Create(tapnet.Config{Name: d.record.ID, MTU: mtu, Resolver: firstResolver4(d.network.Resolvers)})
	var unavailable *tapnet.UnavailableError
	if errors.As(err, &unavailable) {
		return failure.New(failure.NetworkUnavailable, "%w; or go without, with --network-backend usernet", err)
	}
	if err != nil {
		return err
	}
	d.record.Enforcement = &Enforcement{By: EnforceKernel}
	data, err := json.Marshal(d.tap.Maps)
	if err == nil {
		err = os.WriteFile(d.node.tapFile(d.record.ID), append(data, '\n'), 0o600)
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

// admit lets the draft's guest use its network, and hands that over.
func (d *draft) admit(c *process.StartConfig) error {
	card, err := d.record.Identity.CardAddress()
	if err == nil {
		err = d.tap.Admit(card, d.admitted)
	}
	if err != nil {
		return err
	}
	host, err := linux.HostAddresses()
	if err != nil {
		return err
	}
	c.Tap = &process.TapConfig{Host: host, Device: d.tap.Tap, Counts: d.tap.Counts, Events: d.tap.Events, Names: d.tap.Names, IPv6: d.tap.IPv6}
	return nil
}

// duringReset has the VM's network, if that has a TAP, forget what it knows of the guest and let nothing pass until do is done.
func (vm *VM) duringReset(r *Record, do func() error) error {
	err := vm.onTap(func(c *tapnet.Control) error {
		space, err := os.Open(filepath.Join("/proc", strconv.Itoa(r.PID), "ns/net"))
		if err != nil {
			return err
		}
		defer space.Close()
		return c.Suspend(space)
	})
	if err != nil {
		return err
	}
	if err := do(); err != nil {
		_ = vm.onTap((*tapnet.Control).Resume) // the VM has ended, if it was not refused
		return err
	}
	return vm.onTap((*tapnet.Control).Resume)
}
