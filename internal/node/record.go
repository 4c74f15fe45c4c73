package node

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
	"github.com/forkvm/forkvm/internal/tapnet"
)

// RecordSchema is the version of Record's JSON form.
const RecordSchema = "forkvm/vm-record/v1"

const (
	recordFile = "vm.json"
	lockFile   = "lock"
	idBytes    = 6
	maxRecord  = 1 << 20
	// lockInterval is how often a VM's lock is tried while another process has it.
	lockInterval = 10 * time.Millisecond
)

// Record is what is known of a VM from its creation on.
type Record struct {
	Schema  string    `json:"schema"`
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Created time.Time `json:"created"`
	// Image, Snapshot and Parent say what it began from: an image, a snapshot, or
	// the ID of the VM that it was forked from.
	Image  string `json:"image,omitempty"`
	Parent string `json:"parent,omitempty"`
	Life

	Shape machine.Shape `json:"shape"`
	// Network is what the VM may reach, nil if it has no network card.
	Network *policy.Policy `json:"network,omitempty"`
	// Ports are those of this host behind which are the VM's.
	Ports []policy.Port `json:"ports,omitempty"`
	// Enforcement says who enforces that.
	Enforcement *Enforcement `json:"network_enforcement,omitempty"`

	// PID, Started and HostBoot together name the VM process.
	PID      int    `json:"pid"`
	Started  uint64 `json:"pid_start_time"`
	HostBoot string `json:"host_boot_id"`
	// Program is which build of the program the process runs.
	Program string `json:"program,omitempty"`
	// Rehearsed is the ID of the snapshot that a process waits for, empty if it waits for
	// any VM or is one.
	Rehearsed string `json:"rehearsed,omitempty"`
	// Owner is the process that the VM is gone with, nil if it stays.
	Owner *Owner `json:"owner,omitempty"`

	// ReadyMS is the time from the start message to the guest agent's answer; 0
	// as long as the VM starts.
	ReadyMS float64 `json:"ready_ms"`
	// Phases are where the time went between the call that made the VM and its
	// end, except for writing them down.
	Phases []machine.Phase `json:"phases,omitempty"`
	// Recording is what is kept of what is done to the VM.
	Recording Recording `json:"recording,omitempty"`
	// ParentPauseMS is how long the parent of a fork stood still for it.
	ParentPauseMS float64 `json:"parent_pause_ms,omitempty"`
}

// Owner is a process of the same boot of the host as the VM's.
type Owner struct {
	PID     int    `json:"pid"`
	Started uint64 `json:"pid_start_time"`
}

func thisProcess() (*Owner, error) {
	started, err := linux.StartTime(os.Getpid())
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	return &Owner{os.Getpid(), started}, nil
}

// checkName: a VM's name is a file name and, as a hostname, a label of the domain name
// system.
func checkName(name string) error {
	const ends = "abcdefghijklmnopqrstuvwxyz0123456789"
	const inside = ends + "-"
	if len(name) < 1 || len(name) > 63 || strings.Trim(name, inside) != "" ||
		strings.Trim(name[:1]+name[len(name)-1:], ends) != "" {
		return failure.New(failure.InvalidArgument, "vm name %q: 1 to 63 of a-z, 0-9 and -, with no - at either end, are possible", name)
	}
	return nil
}

func newID() string {
	var b [idBytes]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// draft is a VM directory in the making. Its lock is held until the VM is ready
// or given up, so that nobody takes an unfinished directory for a stale one.
type draft struct {
	node   *Node
	record Record
	dir    string
	lock   *os.File
	// prepared is the process that waits in it, nil if there is none yet.
	prepared *process.Prepared

	backend Backend       // of its network card, empty if it has none
	card                  // what the guest may reach; nothing as long as it is not known what the VM is
	enforce Enforcer      // who is to enforce that
	group   *egress.Group // of its process, nil if the kernel does not

	tap       *tapnet.Control // of the network of its process, nil if the card has no TAP
	tapRecord tapnet.Record
}

// newDraft reserves a name and makes the directory. An empty name becomes one
// that is made from the ID.
func (n *Node) newDraft(name string) (*draft, error) {
	id := newID()
	if name == "" {
		name = "vm-" + id
	}
	if err := checkName(name); err != nil {
		return nil, err
	}
	d, err := n.newDirectory(filepath.Join(n.vmsDir(), id), id)
	if err != nil {
		return nil, err
	}
	d.record.Name, d.record.Created = name, time.Now().UTC()
	if err := n.reserve(name, id); err != nil {
		d.abandon()
		return nil, err
	}
	return d, nil
}

// newDirectory makes a draft's directory, among those of VMs or of processes that wait
// to become one.
func (n *Node) newDirectory(dir, id string) (*draft, error) {
	boot, err := linux.BootID()
	if err != nil {
		return nil, failure.As(failure.Internal, err)
	}
	d := &draft{node: n, dir: dir, record: Record{
		Schema:   RecordSchema,
		ID:       id,
		HostBoot: boot,
		Program:  n.program,
	}}
	if err := d.make(); err != nil {
		d.abandon()
		return nil, err
	}
	return d, nil
}

// make makes the directory, and its lock, which is this draft's then. Until it has that, somebody who sweeps may take the directory for one that was
// left behind, and remove it: it is made again.
func (d *draft) make() error {
	const tries = 100
	var err error
	for range tries {
		if err = d.tryMake(); !isSwept(err) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("create vm (%s): %w", d.record.ID, err))
	}
	return nil
}

func (d *draft) tryMake() error {
	if err := os.Mkdir(d.dir, 0o700); err != nil {
		return err
	}
	if err := d.acquire(os.O_CREATE); err != nil {
		return err
	}
	err := process.MakeOwn(d.dir)
	if err != nil {
		d.lock.Close()
		d.lock = nil
	}
	return err
}

// isSwept tells whether a directory is being removed, or was, while it was made: nobody else makes one of its name.
func isSwept(err error) bool {
	return errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EWOULDBLOCK)
}

// acquire takes the lock of the draft's directory. It fails if somebody else has it.
func (d *draft) acquire(flags int) error {
	lock, err := os.OpenFile(filepath.Join(d.dir, lockFile), os.O_RDWR|flags, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return fmt.Errorf("lock: %w", err)
	}
	d.lock = lock
	return nil
}

// reserve makes the link that holds a name. A link whose VM is gone is left over
// from a crash and is replaced.
func (n *Node) reserve(name, id string) error {
	link := filepath.Join(n.namesDir(), name)
	for range 3 {
		err := os.Symlink(id, link)
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return failure.As(failure.Internal, fmt.Errorf("reserve name (%s): %w", name, err))
		}
		holder, err := os.Readlink(link)
		if err == nil && exists(filepath.Join(n.vmsDir(), holder)) {
			return failure.New(failure.VMExists, "vm name %q is taken by %s", name, holder)
		}
		n.release(name, holder)
	}
	return failure.New(failure.VMExists, "vm name %q is wanted by several at once", name)
}

// release removes a name's link if it is the given VM's.
func (n *Node) release(name, id string) {
	link := filepath.Join(n.namesDir(), name)
	if holder, err := os.Readlink(link); err == nil && holder == id {
		os.Remove(link)
	}
}

// launched puts the process on record, before it becomes a VM.
func (d *draft) launched(p *linux.Process) error {
	d.record.PID, d.record.Started = p.PID(), p.Start()
	return d.write()
}

func (d *draft) write() error { return d.record.write(d.dir) }

// write replaces the record on disk, whole or not at all.
func (r *Record) write(dir string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("write record (%s): %w", r.ID, err))
	}
	path := filepath.Join(dir, recordFile)
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o600); err != nil {
		return failure.As(failure.Internal, fmt.Errorf("write record (%s): %w", r.ID, err))
	}
	if err := os.Rename(path+".new", path); err != nil {
		return failure.As(failure.Internal, fmt.Errorf("write record (%s): %w", r.ID, err))
	}
	return nil
}

// change waits until nobody else changes the VM, lets do look at its record as it
// is then, and writes what do made of it.
func (vm *VM) change(ctx context.Context, do func(r *Record) error) error {
	return vm.locked(ctx, func(r *Record) error {
		if err := do(r); err != nil {
			return err
		}
		return r.write(vm.dir)
	})
}

// locked is change for what is on record when do returns.
func (vm *VM) locked(ctx context.Context, do func(r *Record) error) error {
	lock, err := os.OpenFile(filepath.Join(vm.dir, lockFile), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return failure.New(failure.VMNotFound, "vm %s was removed", vm.Name)
	}
	if err != nil {
		return failure.As(failure.Internal, fmt.Errorf("lock vm (%s): %w", vm.Name, err))
	}
	defer lock.Close()
	for unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		select {
		case <-ctx.Done():
			return failure.As(failure.Internal, fmt.Errorf("lock vm (%s): %w", vm.Name, context.Cause(ctx)))
		case <-time.After(lockInterval):
		}
	}
	r, err := vm.current()
	if err != nil {
		return failure.As(failure.Internal, err)
	}
	if err := do(r); err != nil {
		return err
	}
	vm.Record, vm.seen = *r, stampOf(vm.dir)
	return nil
}

// prepare starts the draft's process and lets it make its virtual machine.
func (d *draft) prepare(cpus, mtu int) error {
	command, program, err := d.node.command(d.backend == BackendUser)
	if err != nil {
		return err
	}
	d.record.Program = program
	device, err := openKVM()
	if err != nil {
		return err
	}
	defer device.Close()
	config := process.PrepareConfig{Command: command, Directory: d.dir, KVM: device, CPUs: cpus, Launched: d.launched}
	switch d.backend {
	case BackendTap:
		network, err := d.makeTap(mtu)
		if err != nil {
			return err
		}
		defer network.Close() // the process has it
		config.Tap = &process.TapFiles{Space: network.Space, Device: network.Tap, Counts: network.Counts, Events: network.Events}
	case BackendUser:
		if err := d.confine(); err != nil {
			return err
		}
		if d.group != nil {
			config.Group = d.group.File()
		}
	}
	d.prepared, err = process.Prepare(config)
	return err
}

// start makes the draft's process a VM.
func (d *draft) start(ctx context.Context, c process.StartConfig) (*process.Started, error) {
	var err error
	if d.prepared == nil {
		err = d.prepare(c.Checkpoint.Shape.CPUs, c.Checkpoint.Shape.NetworkMTU)
	} else {
		err = d.write() // it was on record as one that waits
	}
	if err == nil {
		err = d.admit(&c)
	}
	if err != nil {
		return nil, err
	}
	started, err := d.node.startWatched(ctx, d.prepared, c)
	if err == nil && d.group != nil {
		err = d.group.Wait()
	}
	return started, err
}

// admit lets the guest use the network of the draft's process, which the draft lets go of.
func (d *draft) admit(c *process.StartConfig) error {
	defer d.letGo()
	switch {
	case d.tap != nil:
		return d.admitToTap(c)
	case d.group != nil:
		return d.admitToGroup()
	}
	return nil
}

// letGo gives back what the draft has of the network of its process. It is idempotent.
func (d *draft) letGo() {
	if d.tap != nil {
		d.tap.Close()
		d.tap = nil
	}
	if d.group != nil {
		d.group.Close()
	}
}

// finish makes the draft a VM.
func (d *draft) finish(started *process.Started, phases []machine.Phase) (*VM, error) {
	d.record.ReadyMS = milliseconds(started.Ready)
	d.record.Phases = phases
	if err := d.write(); err != nil {
		return nil, err
	}
	d.lock.Close()
	return &VM{Record: d.record, node: d.node, dir: d.dir, started: started}, nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// abandon removes what the draft made, its process included.
func (d *draft) abandon() {
	d.letGo()
	if d.prepared != nil {
		d.prepared.Kill()
	}
	if d.group != nil {
		_ = d.group.Wait() // so that no policy comes when the group is gone
	}
	_ = d.node.removeGroup(d.record.ID) // with it all that is kept of it
	d.node.release(d.record.Name, d.record.ID)
	os.RemoveAll(d.node.rollout(d.record.ID).dir)
	os.RemoveAll(d.dir)
	if d.lock != nil {
		d.lock.Close()
	}
}

// readRecord reads the record in a VM's directory.
func readRecord(dir string) (*Record, error) {
	f, err := os.Open(filepath.Join(dir, recordFile))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var r Record
	if err := json.NewDecoder(io.LimitReader(f, maxRecord)).Decode(&r); err != nil {
		return nil, fmt.Errorf("read %s: %w", f.Name(), err)
	}
	if r.Schema != RecordSchema {
		return nil, fmt.Errorf("read %s: schema %q, not %q", f.Name(), r.Schema, RecordSchema)
	}
	if err := r.addLife(dir); err != nil {
		return nil, err
	}
	return &r, nil
}

// sweep removes a directory without a record, or with that of a process that died
// before its VM was ready, unless somebody is just making it. One that still waits
// for a VM goes back to the others.
func (n *Node) sweep(dir string) {
	lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR, 0)
	if err != nil {
		// Not even the lock: the maker is between its first two calls, or died
		// there. One that lives makes the directory again.
		os.Remove(dir)
		return
	}
	defer lock.Close()
	if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		return
	}
	// Read again under the lock: its maker may have finished in between.
	r, err := readRecord(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		_ = n.removeGroup(filepath.Base(dir))
		os.RemoveAll(dir)
	case err == nil && !(&VM{Record: *r}).begun():
		_ = n.removeGroup(filepath.Base(dir))
		n.release(r.Name, r.ID)
		os.RemoveAll(n.rollout(r.ID).dir)
		os.RemoveAll(dir)
	case err == nil && r.Name == "":
		os.Rename(dir, n.waitingPath(r))
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
