package node

import (
	"errors"
	"slices"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/tapnet"
)

// A process that waits for VMs with a network card has what guards that already, and reaches nothing: it is in a control group of
// its own without a policy, or in a network namespace of its own with a TAP device whose programs let nothing pass. It is on record like
// that of a VM. When the process ends the namespace does; the group goes with the directory.

// shape is what is known of the VMs' shape.
func (w *Waiting) shape() machine.Shape {
	s := machine.Shape{CPUs: w.CPUs, NetworkMTU: w.NetworkMTU}
	if w.Backend == "" {
		s.NetworkMTU = 0
	} else if s.NetworkMTU == 0 {
		s.NetworkMTU = machine.DefaultMTU
	}
	return s
}

// suits says whether a waiting process is for VMs with such a network card. The size of packets matters to TAP devices alone.
func (n *Node) suits(r *Record, backend Backend, mtu int) bool {
	switch {
	case r.Shape.NetworkMTU == 0:
		return backend == ""
	case backend == "" || n.backend(r.ID) != backend:
		return false
	}
	return backend != BackendTap || r.Shape.NetworkMTU == mtu
}

// usable says whether a waiting process is of this build of its program.
func (n *Node) usable(r *Record) bool {
	_, program, err := n.command(r.Shape.NetworkMTU != 0 && n.backend(r.ID) == BackendUser)
	return err == nil && r.Program == program
}

// intact says whether what guards a waiting process's network card is there, as far as that can be known.
func (n *Node) intact(r *Record) bool {
	d := &draft{node: n, record: *r}
	there, err := d.claim()
	d.letGo()
	return there || err != nil
}

// fits says whether a waiting process that is for any VM can become such a one.
func (n *Node) fits(r *Record, o *Options, s machine.Shape) bool {
	return r.Shape.CPUs == s.CPUs && n.fitsCard(r, o, s)
}

// fitsRehearsed says whether a waiting process that has rehearsed a snapshot can become such a VM. One that has given up its privileges for
// that publishes no port that needs some.
func (n *Node) fitsRehearsed(r *Record, o *Options, s machine.Shape) bool {
	if r.Shape.Compatible(s) != nil || !n.fitsCard(r, o, s) {
		return false
	}
	confined := r.Enforcement != nil && r.Enforcement.By == EnforceKernel
	return !confined || !slices.ContainsFunc(o.Ports, func(p policy.Port) bool { return int(p.Host.Port()) < linux.FirstFreePort() })
}

// fitsCard says whether a waiting process is for VMs with such a network card, under the watch of who is to enforce its policy.
func (n *Node) fitsCard(r *Record, o *Options, s machine.Shape) bool {
	backend := o.Backend
	if s.NetworkMTU == 0 {
		backend = ""
	}
	if !n.suits(r, backend, s.NetworkMTU) {
		return false
	}
	if backend != BackendUser {
		return true
	}
	if r.Enforcement != nil && r.Enforcement.By == EnforceKernel {
		return o.Enforce != EnforceUser
	}
	return o.Enforce == EnforceAuto && egress.Available() != nil
}

// claim takes what guards the network card of the draft's process, which has waited. It is not there if it cannot be used any more.
func (d *draft) claim() (there bool, err error) {
	switch {
	case d.record.Shape.NetworkMTU == 0:
	case d.node.backend(d.record.ID) == BackendTap:
		err = d.claimTap(d.record.Shape.NetworkMTU)
	default:
		err = d.claimGroup()
	}
	if errors.Is(err, tapnet.ErrGone) || errors.Is(err, tapnet.ErrStale) || errors.Is(err, egress.ErrNotEnforced) {
		return false, nil
	}
	return err == nil, err
}
