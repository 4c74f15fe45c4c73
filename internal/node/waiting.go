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
// the process and the number of vCPUs, or all of the shape and the snapshot that it has
// rehearsed; its lock is free. Whoever takes the lock and moves the directory to those
// of the VMs goes on with the draft.

// Waiting says for what how many processes are to wait.
type Waiting struct {
	// Count is how many wait afterwards.
	Count int
	// CPUs is how many vCPUs the VMs have. 0 is for a snapshot, and for a count of 0,
	// which ends all that wait then, for whatever.
	CPUs int
	// Snapshot is what the VMs are made of. Empty: any VM.
	Snapshot string
	// Backend is what is behind the VMs' network card. Empty: they have none, or BackendUser
	// if the snapshot has a card.
	Backend Backend
	// NetworkMTU is the size of the largest packet of a card with a TAP device; machine.DefaultMTU if 0. The VMs
	// of a snapshot have its own.
	NetworkMTU int
}

// Prepare brings the number of processes that wait for such a VM to the count, and
// returns how many there are. Processes that cannot be used any more are removed.
func (n *Node) Prepare(ctx context.Context, w Waiting) (int, error) {
	like := Record{Shape: w.shape()}
	if w.Snapshot != "" {
		m, err := n.rehearsable(w.Snapshot)
		if err != nil {
			return 0, err
		}
		like.Rehearsed, like.Snapshot, like.Shape = m.ID, m.Name, machine.ShapeOf(m)
		if w.Backend, err = backendOf(m, w.Backend); err != nil {
			return 0, err
		}
	}
	waiting, err := n.WaitingProcesses()
	if err != nil {
		return 0, err
	}
	have := 0
	for _, r := range waiting {
		switch {
		case !n.usable(r) || like.Shape.CPUs == 0 || n.isOrphaned(r):
			n.endWaiting(r)
		case r.Rehearsed == like.Rehearsed && r.Snapshot == like.Snapshot && r.Shape.CPUs == like.Shape.CPUs && n.suits(r, w.Backend, like.Shape.NetworkMTU):
			if have == w.Count || !n.intact(r) {
				n.endWaiting(r)
				continue
			}
			have++
		}
	}
	for ; have < w.Count; have++ {
		if err := n.prepareOne(ctx, like, w.Backend); err != nil {
			return have, failure.As(failure.Internal, fmt.Errorf("prepare a process for a vm: %w", err))
		}
	}
	return have, nil
}

// prepareOne makes one more process wait, of which the record will say what this one says.
func (n *Node) prepareOne(ctx context.Context, like Record, backend Backend) error {
	like.ID = newID()
	d, err := n.newDirectory(n.waitingPath(&like), like.ID)
	if err != nil {
		return err
	}
	d.record.Shape, d.record.Rehearsed, d.record.Snapshot = like.Shape, like.Rehearsed, like.Snapshot
	d.backend, d.enforce = backend, EnforceAuto
	if err = d.prepare(like.Shape.CPUs, like.Shape.NetworkMTU); err == nil {
		if like.Rehearsed == "" {
			err = d.prepared.Detach(ctx)
		} else {
			err = d.rehearse(ctx)
		}
	}
	if err != nil {
		d.abandon()
		return err
	}
	d.letGo()
	return d.lock.Close()
}

// kind ends the names of directories of processes that have rehearsed, so that who looks
// for those of one snapshot reads few other records. Paths of sockets have no room for
// more.
func kind(rehearsed string) string {
	if rehearsed == "" {
		return ""
	}
	return "-" + rehearsed[:2]
}

// waitingPath is the directory of a process that waits.
func (n *Node) waitingPath(r *Record) string {
	return filepath.Join(n.waitingDir(), r.ID+kind(r.Rehearsed))
}

// WaitingProcesses lists the records of the processes that wait, and removes what is left
// of those that do not any more.
func (n *Node) WaitingProcesses() ([]*Record, error) {
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
	if d := n.takeOver(r); d != nil {
		d.end()
	}
}

// end ends the process that has waited.
func (d *draft) end() {
	if p, err := (&VM{Record: d.record}).open(); err == nil {
		// Not an error if it is gone already.
		_ = p.Signal(syscall.SIGKILL)
		p.Close()
	}
	d.abandon()
}

// takeOver locks a waiting process's directory and makes it a VM's. It returns
// nil if somebody else was faster.
func (n *Node) takeOver(r *Record) *draft {
	d := &draft{node: n, record: *r, dir: n.waitingPath(r)}
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
	d.letGo()
	if os.Rename(d.dir, d.node.waitingPath(&d.record)) != nil {
		d.abandon()
		return
	}
	d.lock.Close()
}

// draft begins a VM, with a process that waits if there is one that fits: best one that
// has rehearsed what the VM begins near.
func (n *Node) draft(ctx context.Context, o Options, l plan) (*draft, error) {
	shape := l.checkpoint.Shape
	if l.rehearsed != "" {
		fits := func(r *Record) bool { return r.Rehearsed == l.rehearsed && n.fitsRehearsed(r, &o, shape) }
		if d, err := n.adoptAny(ctx, o, l.rehearsed, shape.MemoryBytes, fits); d != nil || err != nil {
			return d, err
		}
	}
	fits := func(r *Record) bool { return n.fits(r, &o, shape) }
	if d, err := n.adoptAny(ctx, o, "", shape.MemoryBytes, fits); d != nil || err != nil {
		return d, err
	}
	return n.newDraft(o.Name)
}

// adoptAny goes on with the draft of a waiting process that fits, of those that have
// rehearsed a snapshot or of those for any VM. It returns nil if there is none.
func (n *Node) adoptAny(ctx context.Context, o Options, rehearsed string, ram uint64, fits func(*Record) bool) (*draft, error) {
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
		name := entries[(first+i)%len(entries)].Name()
		if len(name) < 2*idBytes || name[2*idBytes:] != kind(rehearsed) {
			continue
		}
		r, err := readRecord(filepath.Join(n.waitingDir(), name))
		if err != nil || !n.usable(r) || !fits(r) || !roomWhereItWaits(r.PID, o, ram) {
			continue
		}
		if d, err := n.adopt(ctx, r, o.Name); d != nil || err != nil {
			return d, err
		}
	}
	return nil, nil
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
	if there, err := d.claim(); err != nil {
		d.handBack()
		return nil, err
	} else if !there {
		d.end()
		return nil, nil
	}
	if err := n.reserve(name, r.ID); err != nil {
		d.handBack()
		return nil, err
	}
	d.record.Name, d.record.Created, d.record.Rehearsed = name, time.Now().UTC(), ""
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
