package node

import (
	"errors"
	"os"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// admit refuses VMs that could exceed the memory limit of the control group that they
// would run in. What it admits is counted until release is called, so that VMs which
// are made side by side do not all count on the same memory.
func (n *Node) admit(d machine.Demand) (release func(), err error) {
	n.admission.Lock()
	defer n.admission.Unlock()
	if err := d.Check(os.Getpid(), n.admitted); err != nil {
		return nil, limitFailure(err)
	}
	sure := d.Sure()
	n.admitted += sure
	return func() {
		n.admission.Lock()
		defer n.admission.Unlock()
		n.admitted -= sure
	}, nil
}

// admitFork is admit for VMs that are made of a running one, which may be in another
// control group.
func (n *Node) admitFork(parent *VM, d machine.Demand) (release func(), err error) {
	if parent.inOwnGroup() {
		d.VMs, d.Freeze = d.VMs+1, true
		return n.admit(d)
	}
	own := machine.Demand{VMs: 1, RAM: d.RAM, Headroom: d.Headroom, Freeze: true}
	if err := own.Check(parent.PID, 0); err != nil {
		return nil, limitFailure(err)
	}
	return n.admit(d)
}

// roomWhereItWaits is admit for a process that waits in another control group.
func roomWhereItWaits(pid int, o Options, ram uint64) bool {
	if linux.SameGroup(pid, os.Getpid()) {
		return true
	}
	return machine.Demand{VMs: 1, RAM: ram, Headroom: o.Headroom}.Check(pid, 0) == nil
}

// limitFailure gives a refusal its code, and says what can be done.
func limitFailure(err error) error {
	var limit *machine.MemoryLimitError
	if !errors.As(err, &limit) {
		return err
	}
	e := failure.New(failure.MemoryLimit, "%w; end some VMs, raise memory.max, or say with --headroom how much each VM will need (0: do not look)", err)
	e.Memory = &failure.Memory{Group: limit.Group, Limit: limit.Limit, Used: limit.Used, Need: limit.Need}
	return e
}
