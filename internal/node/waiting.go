package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

// Processes that wait to become VMs have directories like those of VMs, apart from
// them. Such a directory is a draft that its maker has let go of: its record has
// the process and the number of vCPUs, its lock is free. Whoever takes the lock
// and moves the directory to those of the VMs goes on with the draft.

// Prepare brings the number of processes that wait for a VM with this many vCPUs
// to count, and returns how many there are. With a count of 0 and no vCPUs it ends
// all that wait, for whatever number. Processes that cannot be used any more are
// removed.
func (n *Node) Prepare(ctx context.Context, cpus, count int) (int, error) {
	waiting, err := n.waiting()
	if err != nil {
		return 0, err
	}
	have := 0
	for _, r := range waiting {
		switch {
		case r.Program != n.program || cpus == 0:
			n.endWaiting(r)
		case r.Shape.CPUs == cpus:
			if have++; have > count {
				n.endWaiting(r)
			}
		}
	}
	have = min(have, count)
	for ; have < count; have++ {
		if err := n.prepareOne(ctx, cpus); err != nil {
			return have, failure.As(failure.Internal, fmt.Errorf("prepare a process for a vm: %w", err))
		}
	}
	return have, nil
}

func (n *Node) prepareOne(ctx context.Context, cpus int) error {
	d, err := n.newDirectory(n.waitingDir(), newID())
	if err != nil {
		return err
	}
	d.record.Shape.CPUs = cpus
	if err = d.prepare(cpus, 0); err == nil {
		err = d.prepared.Detach(ctx)
	}
	if err != nil {
		d.abandon()
		return err
	}
	return d.lock.Close()
}

// waiting lists the records of the processes that wait, and removes what is left
// of those that do not any more.
func (n *Node) waiting() ([]*Record, error) {
	entries, err := os.ReadDir(n.waitingDir())
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("list waiting processes: %w", err))
	}
	var waiting []*Record
	for _, e := range entries {
		dir := filepath.Join(n.waitingDir(), e.Name())
		r, err := readRecord(dir)
		if err != nil || !(&VM{Record: *r}).begun() {
			n.sweep(dir)
			continue
		}
		waiting = append(waiting, r)
	}
	return waiting, nil
}

// endWaiting ends a waiting process, unless somebody has begun to use it.
func (n *Node) endWaiting(r *Record) {
	d := n.takeOver(r)
	if d == nil {
		return
	}
	if p, err := (&VM{Record: *r}).open(); err == nil {
		// Not an error if it is gone already.
		_ = p.Signal(syscall.SIGKILL)
		p.Close()
	}
	d.abandon()
}

// takeOver locks a waiting process's directory and makes it a VM's. It returns
// nil if somebody else was faster.
func (n *Node) takeOver(r *Record) *draft {
	d := &draft{node: n, record: *r, dir: filepath.Join(n.waitingDir(), r.ID)}
	if d.acquire(0) != nil {
		return nil
	}
	dir := filepath.Join(n.vmsDir(), r.ID)
	if os.Rename(d.dir, dir) != nil {
		d.lock.Close()
		return nil
	}
	d.dir = dir
	return d
}

// handBack makes the directory one of a waiting process again.
func (d *draft) handBack() {
	if os.Rename(d.dir, filepath.Join(d.node.waitingDir(), d.record.ID)) != nil {
		d.abandon()
		return
	}
	d.lock.Close()
}

// draft begins a VM, with a process that waits if there is one that fits.
func (n *Node) draft(ctx context.Context, o Options, shape machine.Shape) (*draft, error) {
	if shape.NetworkMTU != 0 { // those that wait have no network
		return n.newDraft(o.Name)
	}
	entries, err := os.ReadDir(n.waitingDir())
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	// Those who come at the same time shall not all try the same ones.
	first := 0
	if len(entries) > 1 {
		first = rand.IntN(len(entries))
	}
	for i := range entries {
		r, err := readRecord(filepath.Join(n.waitingDir(), entries[(first+i)%len(entries)].Name()))
		if err != nil || r.Shape.CPUs != shape.CPUs || r.Program != n.program || !roomWhereItWaits(r.PID, o, shape.MemoryBytes) {
			continue
		}
		if d, err := n.adopt(ctx, r, o.Name); d != nil || err != nil {
			return d, err
		}
	}
	return n.newDraft(o.Name)
}

// adopt goes on with the draft of a waiting process. It returns nil if that is
// not to be had.
func (n *Node) adopt(ctx context.Context, r *Record, name string) (*draft, error) {
	if name == "" {
		name = "vm-" + r.ID
	}
	if err := checkName(name); err != nil {
		return nil, err
	}
	d := n.takeOver(r)
	if d == nil {
		return nil, nil
	}
	if err := n.reserve(name, r.ID); err != nil {
		d.handBack()
		return nil, err
	}
	d.record.Name, d.record.Created = name, time.Now().UTC()
	var err error
	if d.prepared, err = process.Adopt(ctx, d.dir, r.PID, r.Started); err != nil {
		d.abandon() // it has died while it waited
		return nil, nil
	}
	return d, nil
}

// programID tells builds of a program apart. It is empty, and so nothing fits, if
// there is no such program.
func programID(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	return fmt.Sprintf("%x:%x:%x:%x", st.Dev, st.Ino, st.Size, info.ModTime().UnixNano())
}
