package node

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/tapnet"
)

// Enforcer is who keeps a VM to its network policy.
type Enforcer string

// The enforcers.
const (
	// EnforceAuto is the kernel where that can be had, otherwise the VM's process alone.
	EnforceAuto Enforcer = "auto"
	// EnforceKernel is the kernel below the VM's process: a VM for which that cannot be had is not made.
	EnforceKernel Enforcer = "kernel"
	// EnforceUser is the VM's process alone.
	EnforceUser Enforcer = "user"
)

// Enforcement is who keeps a VM to its network policy, and how.
type Enforcement struct {
	By Enforcer `json:"by"` // EnforceKernel or EnforceUser
	// Group is the directory of the VM's own control group, if By is EnforceKernel; Node.group is for who acts on it.
	Group string `json:"group,omitempty"`
	// Reason says why the kernel does not, although it was to if it can.
	Reason string `json:"reason,omitempty"`
}

// The groups of VMs are on record in a directory of their own, by the VM's ID: a group is there before the VM's record is.
func (n *Node) groupsDir() string { return filepath.Join(n.config.RunDir, "groups") }

// group is the directory of a VM's control group, "" if the kernel does not enforce the VM's policy.
func (n *Node) group(id string) string {
	path, err := os.Readlink(filepath.Join(n.groupsDir(), id))
	if err != nil {
		return ""
	}
	return path
}

// removeGroup removes a VM's control group, with whatever is still in it.
func (n *Node) removeGroup(id string) error {
	if err := os.Remove(n.tapFile(id)); err == nil {
		return nil // a VM with a TAP has no group, and its network ended with its process
	}
	path := n.group(id)
	if path == "" {
		return nil
	}
	err := egress.Remove(path, id)
	if err == nil {
		if err = os.Remove(filepath.Join(n.groupsDir(), id)); errors.Is(err, fs.ErrNotExist) {
			err = nil // somebody else has
		}
	}
	return failureOf(err)
}

func failureOf(err error) error {
	if err == nil {
		return nil
	}
	return failure.As(failure.Internal, err)
}

// group is the VM's, see Node.group.
func (vm *VM) group() string { return vm.node.group(filepath.Base(vm.dir)) }

// enforcedAs is how a child's policy is enforced of which nobody has said how: like its parent's.
func (vm *VM) enforcedAs() Enforcer {
	switch {
	case vm.group() != "" || vm.Backend() == BackendTap:
		return EnforceKernel
	case vm.Enforcement == nil || vm.Enforcement.Reason != "":
		return EnforceAuto
	}
	return EnforceUser
}

// confine makes the control group of the draft's process, from which nothing is reached yet, if there is to be one.
func (d *draft) confine() error {
	d.record.Enforcement = &Enforcement{By: EnforceUser}
	if d.enforce == EnforceUser {
		return nil
	}
	link := filepath.Join(d.node.groupsDir(), d.record.ID)
	group, err := egress.Create(d.record.ID, func(path string) error { return os.Symlink(path, link) })
	var unavailable *egress.UnavailableError
	switch {
	case errors.As(err, &unavailable) && d.enforce == EnforceKernel:
		return failure.New(failure.NetworkUnenforced, "%w; or go without, with --network-enforce user", err)
	case errors.As(err, &unavailable):
		d.record.Enforcement.Reason = unavailable.Error()
		_ = os.Remove(link) // there may be none
		return nil
	case err != nil:
		return err // what is on record goes with the draft
	}
	d.record.Enforcement = &Enforcement{By: EnforceKernel, Group: group.Path}
	d.group = group
	return nil
}

// claimGroup takes the control group of a process that waits, if that has one.
func (d *draft) claimGroup() (err error) {
	if path := d.node.group(d.record.ID); path != "" {
		d.group, err = egress.Open(path, d.record.ID)
	}
	return err
}

// admitToGroup lets the draft's process reach what its guest may.
func (d *draft) admitToGroup() error {
	regions, err := kernelPolicy(d.rules, d.network.Resolvers)
	if err != nil {
		return err
	}
	return d.group.Admit(regions, d.network.Ports)
}

// kernelPolicy is what the kernel is to allow.
func kernelPolicy(rules *policy.Rules, resolvers []netip.AddrPort) ([]policy.Region, error) {
	host, err := linux.HostAddresses()
	if err != nil {
		return nil, err
	}
	return rules.Regions(policy.Surroundings{Host: host, Resolvers: resolvers}), nil
}

// setKernelPolicy replaces what the kernel allows the VM, if it enforces that. The rules are the policy's.
func (vm *VM) setKernelPolicy(p policy.Policy, rules *policy.Rules) error {
	if vm.Backend() == BackendTap {
		pass, err := throughTap(p, rules)
		if err != nil {
			return err
		}
		return vm.onTap(func(c *tapnet.Control) error { return c.SetPolicy(vm.space, pass.policy) })
	}
	group := vm.group()
	if group == "" {
		return nil
	}
	regions, err := kernelPolicy(rules, hostResolvers(resolvPath))
	if err == nil {
		err = egress.SetPolicy(group, regions)
	}
	return failureOf(err)
}

// KernelRefused says what the kernel has refused to the VM's process, nil if it does not enforce the policy.
func (vm *VM) KernelRefused() (*egress.Refused, error) {
	group := vm.group()
	if group == "" {
		return nil, nil
	}
	r, err := egress.RefusedBy(group)
	return &r, failureOf(err)
}

// inOwnGroup reports whether the VM's process counts towards the limits of the calling process's control group.
func (vm *VM) inOwnGroup() bool {
	group := vm.group()
	if group == "" {
		return linux.SameGroup(vm.PID, os.Getpid())
	}
	own, err := linux.ControlGroup()
	return err == nil && filepath.Dir(group) == own
}
