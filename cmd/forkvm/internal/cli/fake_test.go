package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/archive"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// epoch is when everything in the fake was made.
var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// fakeNode is a node in memory.
type fakeNode struct {
	dir string

	mu        sync.Mutex // restores run side by side
	vms       []*fakeVM
	snapshots []store.Info
	images    []Image
	rollouts  []*fakeRollout
	made      []node.Options // of Boot, Restore and Fork
	built     []image.Config
	bootErr   error
	console   string // of VMs that are made
	tried     []node.Trial
	trial     *judge.Trial
}

// fakeVM is a VM whose guest runs a few commands that the tests name.
type fakeVM struct {
	node    *fakeNode
	record  node.Record
	status  node.Status
	removed bool
	console string
	mu      sync.Mutex // status changes while it is waited for
	// onExec, if set, happens while a command runs.
	onExec  func()
	execErr error
	got     client.Command
	signal  string // the last one to a command
	files   map[string]string
	ended   chan struct{}

	judged   []node.Judging
	verdicts []*judge.Verdict // one for each call, again and again
}

func (v *fakeVM) SetNetwork(_ context.Context, p policy.Policy) error {
	v.record.Network = &p
	return nil
}

func (v *fakeVM) KernelRefused() (*egress.Refused, error) {
	return &egress.Refused{Calls: 4, Packets: 1}, nil
}

func (v *fakeVM) NetworkStatus(context.Context) (*machine.NetworkStatus, error) {
	if v.record.Network == nil {
		return nil, failure.New(failure.InvalidArgument, "vm %s has no network card", v.record.Name)
	}
	return &machine.NetworkStatus{Status: policy.Status{Connections: 2, Refused: 3, Refusals: []policy.Refusal{
		{Protocol: "tcp", Address: "169.254.169.254", Port: 80, Reason: policy.ReasonSpecial, Count: 2, Last: epoch},
		{Protocol: "dns", Name: "evil\x1b.example", Reason: policy.ReasonNotAllowed, Count: 1, Last: epoch},
	}}}, nil
}

func newFakeNode(t *testing.T) *fakeNode {
	n := &fakeNode{dir: t.TempDir()}
	n.add("a00000000001", "alpha", node.Status{State: node.Running, PrivateBytes: 9 << 20}, func(r *node.Record) { r.Image = "debian" })
	n.add("b00000000002", "beta", node.Status{State: node.Paused, PrivateBytes: 3 << 20}, func(r *node.Record) { r.Image, r.Snapshot = "debian", "task-1" })
	n.add("c00000000003", "gamma", node.Status{State: node.Ended, Exit: &vmm.Exit{Reason: vmm.ReasonGuestPanic, VCPU: 1, Detail: "Kernel panic - not syncing: \x1b[31mred"}}, func(r *node.Record) { r.Image, r.Parent = "debian", "a00000000001" })
	n.add("d00000000004", "delta", node.Status{State: node.Dead}, func(r *node.Record) { r.Image = "debian" })
	m := &snapshot.Manifest{
		Schema: snapshot.Schema, Name: "task-1", ID: strings.Repeat("5a", 16), Created: epoch, Task: "fix-it", Image: "debian", ForkVMVersion: "test",
		Guest:  snapshot.Guest{CPUs: 2, MemoryBytes: 1 << 30},
		Memory: []snapshot.LayerRef{{ID: strings.Repeat("01", 16), File: "memory-1.layer", Format: snapshot.FormatLayer, Bytes: 90 << 20, Units: 1 << 18, Stored: 23000}},
		Disks:  []snapshot.Disk{{ID: "root", Size: 1 << 30, Layers: []snapshot.LayerRef{{ID: strings.Repeat("02", 16), File: "disk-root-2.layer", Format: snapshot.FormatRaw, Bytes: 1 << 30, Units: 1 << 18, Stored: 1 << 18}}}},
		State:  snapshot.FileRef{File: "state", Bytes: 40000},
	}
	n.snapshots = []store.Info{
		{Name: "broken", Err: &store.CorruptError{Snapshot: "broken", File: "state", Reason: snapshot.ErrTruncated}},
		{Name: "task-1", Manifest: m, Sizes: store.Sizes{Own: 80 << 20, Shared: 1 << 30}},
	}
	// Steps that grew from it, in a row and beside each other; the one before the
	// last was removed.
	steps := []string{m.ID, id(1), id(2), id(3), id(4)}
	for i, s := range []struct {
		name    string
		lineage []string
	}{
		{"step-1", steps[:1]},
		{"step-2", []string{steps[1], steps[0]}},
		{"other", []string{steps[1], steps[0]}},
		{"late", []string{steps[4], steps[2], steps[1], steps[0]}},
	} {
		step := *m
		step.Name, step.ID, step.Created, step.Task = s.name, id(i+1), epoch.Add(time.Duration(i+1)*time.Minute), ""
		if s.name == "late" {
			step.ID = id(5)
		}
		step.Descend(s.lineage)
		n.snapshots = append(n.snapshots, store.Info{Name: s.name, Manifest: &step, Sizes: store.Sizes{Own: 5 << 20, Shared: 1104 << 20}})
	}
	step := *m
	step.Name, step.ID, step.Created = "a00000000001.2", id(9), epoch.Add(time.Hour)
	step.Descend(steps[2:3])
	n.snapshots = append(n.snapshots, store.Info{Name: step.Name, Manifest: &step, Sizes: store.Sizes{Own: 1 << 20}})
	n.vms[0].record.Lineage = []string{id(9), id(2), id(1)}
	n.vms[1].record.Lineage = []string{m.ID}
	n.images = []Image{{Name: "debian", Manifest: image.Manifest{
		Schema: image.Schema, ID: strings.Repeat("ab", 32), CreatedAt: epoch, KernelRelease: "6.12.117+deb12-cloud-amd64", Mode: "handover",
		Files: map[image.Part]image.FileInfo{image.Kernel: {Size: 40 << 20}, image.Rootfs: {Size: 1 << 30}},
	}}}
	n.judged()
	n.fillRollouts()
	return n
}

func (n *fakeNode) add(id, name string, st node.Status, origin func(*node.Record)) *fakeVM {
	vm := &fakeVM{node: n, status: st, console: n.console, files: map[string]string{}, ended: make(chan struct{})}
	vm.record = node.Record{
		Schema: node.RecordSchema, ID: id, Name: name, Created: epoch,
		Shape: machine.Shape{CPUs: 2, MemoryBytes: 1 << 30, Disks: []machine.DiskShape{{Name: "root", Size: 1 << 30}}},
		PID:   1000 + len(n.vms), ReadyMS: 12.5,
	}
	vm.record.Identity = machine.Identity{Generation: "00000000-0000-0000-0000-0000000000" + id[10:], Hostname: name, MachineID: strings.Repeat("0", 20) + id, Time: machine.TimeHost}
	origin(&vm.record)
	n.vms = append(n.vms, vm)
	return vm
}

func (n *fakeNode) make(o node.Options, origin func(*node.Record)) (VM, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.bootErr != nil {
		return nil, n.bootErr
	}
	n.made = append(n.made, o)
	id := fmt.Sprintf("e%011d", len(n.made))
	if o.Name == "" {
		o.Name = "vm-" + id
	} else {
		id = fmt.Sprintf("%012x", crc32.ChecksumIEEE([]byte(o.Name)))
	}
	for _, vm := range n.vms {
		if vm.record.Name == o.Name {
			return nil, failure.New(failure.VMExists, "vm name %q is taken by %s", o.Name, vm.record.ID)
		}
	}
	return n.add(id, o.Name, node.Status{State: node.Running}, origin), nil
}

func (n *fakeNode) Boot(_ context.Context, image string, o node.Options) (VM, error) {
	if image != "debian" {
		return nil, failure.New(failure.ImageNotFound, "no image named %q; 'forkvm image ls' lists them", image)
	}
	return n.make(o, func(r *node.Record) { r.Image = image })
}

func (n *fakeNode) Restore(_ context.Context, name string, o node.Options) (VM, error) {
	if _, err := n.InspectSnapshot(name); err != nil {
		return nil, err
	}
	return n.make(o, func(r *node.Record) { r.Snapshot = name })
}

func (n *fakeNode) Prepare(_ context.Context, w node.Waiting) (int, error) { return w.Count, nil }

func (n *fakeNode) List() ([]VM, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var vms []VM
	for _, vm := range n.vms {
		if !vm.removed {
			vms = append(vms, vm)
		}
	}
	return vms, nil
}

func (n *fakeNode) Find(ref string) (VM, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, vm := range n.vms {
		if !vm.removed && (vm.record.Name == ref || vm.record.ID == ref) {
			return vm, nil
		}
	}
	return nil, failure.New(failure.VMNotFound, "no vm named %q", ref)
}

// fakeRollout has a real journal, whose clock goes a second a line.
type fakeRollout struct {
	id, dir string
	steps   []string
	removed bool
}

func (n *fakeNode) addRollout(id string) (*fakeRollout, *journal.Journal) {
	r := &fakeRollout{id: id, dir: filepath.Join(n.dir, "rollouts", id)}
	j, err := journal.Create(r.dir, id)
	if err != nil {
		panic(err)
	}
	now := epoch
	j.Now = func() time.Time { now = now.Add(time.Second); return now }
	n.rollouts = append(n.rollouts, r)
	return r, j
}

func (r *fakeRollout) ID() string                               { return r.id }
func (r *fakeRollout) Journal() (*journal.File, error)          { return journal.OpenFile(r.dir, r.id) }
func (r *fakeRollout) Kept(c *journal.Contents) ([]byte, error) { return journal.Kept(r.dir, c) }
func (r *fakeRollout) Steps() ([]string, error)                 { return r.steps, nil }
func (r *fakeRollout) Remove() error                            { r.removed = true; return nil }

func (n *fakeNode) Rollouts() (all []Rollout, err error) {
	for _, r := range n.rollouts {
		if !r.removed {
			all = append(all, r)
		}
	}
	return all, nil
}

func (n *fakeNode) FindRollout(ref string) (Rollout, error) {
	for _, r := range n.rollouts {
		if !r.removed && r.id == ref {
			return r, nil
		}
	}
	vm, err := n.Find(ref)
	if err == nil && vm.Record().ID != ref {
		return n.FindRollout(vm.Record().ID)
	}
	return nil, failure.New(failure.RolloutNotFound, "no rollout named %q is on record", ref)
}

// fillRollouts gives alpha and beta a past, and makes one whose VM is gone and one
// that is damaged.
func (n *fakeNode) fillRollouts() {
	must := func(_ journal.Head, err error) {
		if err != nil {
			panic(err)
		}
	}
	contents := func(j *journal.Journal, text string) *journal.Contents {
		tap := j.Tap(24)
		io.WriteString(tap, text)
		c, err := tap.Contents()
		if err != nil {
			panic(err)
		}
		return c
	}
	r, j := n.addRollout("a00000000001")
	defer j.Close()
	must(j.Append("created", journal.Created{VM: r.id, Name: "alpha", Image: "debian", Snapshot: "task-1", SnapshotID: strings.Repeat("5a", 16), Task: "fix-it", Recording: "steps"}))
	must(j.Append("exec", journal.Operation{Args: []proto.Text{"uname"}, Env: []proto.Text{"CI"}}))
	must(j.Append("done", journal.Done{Of: 2, Result: &journal.Result{DurationMS: 7}, Stdout: contents(j, "Linux guest 6.12.117\n"), Stderr: contents(j, ""), Step: r.id + ".2", StepID: id(9)}))
	must(j.Append("put", journal.Operation{Path: "/root/\x1b[31mx", Mode: 0o644}))
	must(j.Append("done", journal.Done{Of: 4, Input: contents(j, strings.Repeat("\xff", 30))}))
	must(j.Append("exec", journal.Operation{Args: []proto.Text{"sh", "-c", "it's"}, TimeoutMS: 1000}))
	must(j.Append("done", journal.Done{Of: 6, Result: &journal.Result{ExitCode: 124, TimedOut: true, DurationMS: 1000}, Stdout: contents(j, "")}))
	must(j.Append("forked", journal.Forked{Children: []string{"b00000000002", "f00000000006"}, PauseMS: 1.5}))
	must(j.Append("exec", journal.Operation{Args: []proto.Text{"wait"}}))
	n.rollouts[0].steps = []string{r.id + ".2"}

	half, one := 0.5, 1.0
	r, j = n.addRollout("b00000000002")
	defer j.Close()
	must(j.Append("created", journal.Created{VM: r.id, Name: "beta", Image: "debian", Snapshot: "task-1", Parent: "a00000000001", ParentSeq: 7}))
	must(j.Append("paused", struct{}{}))
	must(j.Append("verdict", journal.Verdict{Outcome: "scored", Reward: &half}))
	r, j = n.addRollout("f00000000006")
	defer j.Close()
	must(j.Append("created", journal.Created{VM: r.id, Name: "gone", Image: "debian", Snapshot: "task-1", Parent: "a00000000001", ParentSeq: 7}))
	must(j.Append("verdict", journal.Verdict{Outcome: "verifier_timeout"}))
	must(j.Append("verdict", journal.Verdict{Outcome: "scored", Reward: &one}))
	must(j.Append("removed", journal.Ended{Reason: "killed"}))
	r, j = n.addRollout("f00000000007")
	defer j.Close()
	must(j.Append("created", journal.Created{VM: r.id, Name: "bad", Image: "debian"}))
	must(j.Append("paused", struct{}{}))
	path := filepath.Join(r.dir, "journal.jsonl")
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, bytes.Replace(b, []byte("paused"), []byte("forged"), 1), 0o600)
	}
	if err != nil {
		panic(err)
	}
}

func (n *fakeNode) Snapshots() ([]store.Info, error) { return n.snapshots, nil }

// id is one for a snapshot.
func id(i int) string { return fmt.Sprintf("%032x", i) }

func (n *fakeNode) InspectSnapshot(name string) (store.Info, error) {
	if of, line, step := strings.Cut(name, "@"); step { // as of alpha
		if r, err := n.FindRollout(of); err != nil || line > "2" {
			return store.Info{}, failure.New(failure.SnapshotNotFound, "rollout %s has no step behind line %s of its journal", of, line)
		} else if line == "1" {
			name = "task-1"
		} else {
			name = r.ID() + "." + line
		}
	}
	for _, s := range n.snapshots {
		if s.Name == name && s.Err != nil {
			return store.Info{}, failure.New(failure.SnapshotCorrupt, "snapshot: %w", s.Err)
		}
		if s.Name == name {
			return s, nil
		}
	}
	return store.Info{}, failure.New(failure.SnapshotNotFound, "snapshot: %s: not found", name)
}

func (n *fakeNode) CheckSnapshot(_ context.Context, name string, v *store.Verification) error {
	info, err := n.InspectSnapshot(name)
	if err == nil {
		v.Progress(info.Manifest.LayerBytes())
	}
	return err
}

func (n *fakeNode) DiffSnapshots(_ context.Context, a, b string) (*store.Difference, error) {
	for _, name := range []string{a, b} {
		if _, err := n.InspectSnapshot(name); err != nil {
			return nil, err
		}
	}
	return &store.Difference{
		Memory: []layer.Range{{Start: 10, Count: 2}, {Start: 70000, Count: 300}},
		Disks:  []store.DiskDifference{{ID: "root", Blocks: []layer.Range{{Start: 5, Count: 1}}}, {ID: "scratch"}},
	}, nil
}

func (n *fakeNode) RemoveSnapshot(name string) error {
	for i, s := range n.snapshots {
		if s.Name == name {
			n.snapshots = append(n.snapshots[:i], n.snapshots[i+1:]...)
			return nil
		}
	}
	return failure.New(failure.SnapshotNotFound, "snapshot: %s: not found", name)
}

func (n *fakeNode) ExportSnapshot(_ context.Context, name string, w io.Writer, _ func(int64)) (archive.Result, error) {
	if _, err := n.InspectSnapshot(name); err != nil {
		return archive.Result{}, err
	}
	_, err := fmt.Fprintf(w, "stream of %s\n", name)
	return archive.Result{Files: 4, Bytes: 5 << 20, Chunks: 40, NewChunks: 40, NewBytes: 2 << 20}, err
}

func (n *fakeNode) ArchiveSnapshot(_ context.Context, name, _ string, _ func(int64)) (archive.Result, error) {
	_, err := n.InspectSnapshot(name)
	return archive.Result{Files: 4, Bytes: 5 << 20, Chunks: 40, NewChunks: 3, NewBytes: 1 << 16}, err
}

func (n *fakeNode) ImportSnapshot(_ context.Context, r io.Reader, as string, _ func(int64)) (store.Info, error) {
	b, err := io.ReadAll(r)
	if err != nil || len(b) == 0 {
		return store.Info{}, failure.New(failure.SnapshotCorrupt, "read archive: header: %w", snapshot.ErrTruncated)
	}
	return n.UnarchiveSnapshot(context.Background(), "", "task-1", as, nil)
}

func (n *fakeNode) RemoveArchived(_ context.Context, _, name string) error {
	_, err := n.InspectSnapshot(name)
	return err
}

func (n *fakeNode) UnarchiveSnapshot(_ context.Context, _, name, as string, _ func(int64)) (store.Info, error) {
	info, err := n.InspectSnapshot(name)
	if as != "" {
		info.Name = as
	}
	return info, err
}

func (n *fakeNode) Images() ([]Image, error) { return n.images, nil }

func (n *fakeNode) BuildImage(_ context.Context, name string, c image.Config) (Image, error) {
	n.built = append(n.built, c)
	if name == "debian" {
		return Image{}, failure.New(failure.ImageExists, "an image named %q exists: remove it first, or choose another name", name)
	}
	i := n.images[0]
	i.Name = name
	return i, nil
}

func (n *fakeNode) RemoveImage(name string) error {
	if name != "debian" {
		return failure.New(failure.ImageNotFound, "no image named %q", name)
	}
	return nil
}

func (vm *fakeVM) Record() node.Record { return vm.record }
func (vm *fakeVM) Guest() Guest        { return fakeGuest{vm} }

func (vm *fakeVM) Paths() Paths {
	path := filepath.Join(vm.node.dir, vm.record.ID)
	os.WriteFile(path, []byte(vm.console), 0o600)
	return Paths{Directory: "/run/forkvm/vms/" + vm.record.ID, Console: path, Vsock: "/run/forkvm/vms/" + vm.record.ID + "/vsock.sock"}
}

func (vm *fakeVM) Status(context.Context) (*node.Status, error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	st := vm.status
	return &st, nil
}

func (vm *fakeVM) Pause(context.Context) error  { return vm.switchTo(node.Paused) }
func (vm *fakeVM) Resume(context.Context) error { return vm.switchTo(node.Running) }

func (vm *fakeVM) Reset(_ context.Context, o node.ResetOptions) (time.Duration, error) {
	if o.To == "" && vm.record.Snapshot == "" && !vm.over() {
		return 0, failure.New(failure.InvalidArgument, "vm %s was booted from an image and has no snapshot to go back to", vm.record.Name)
	}
	if o.To != "" {
		if _, err := vm.node.InspectSnapshot(o.To); err != nil {
			return 0, err
		}
		vm.record.Snapshot = o.To
	}
	if err := vm.switchTo(node.Running); err != nil {
		return 0, err
	}
	return 2500 * time.Microsecond, nil
}

func (vm *fakeVM) switchTo(s node.State) error {
	if vm.over() {
		return failure.New(failure.VMNotRunning, "vm %s is not running", vm.record.Name)
	}
	vm.become(node.Status{State: s})
	return nil
}

func (vm *fakeVM) become(st node.Status) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	vm.status = st
}

func (vm *fakeVM) over() bool {
	st, _ := vm.Status(context.Background())
	return st.State == node.Ended || st.State == node.Dead
}

func (vm *fakeVM) Kill(context.Context) error {
	if !vm.over() {
		vm.end(vmm.ReasonKilled)
	}
	return nil
}

// end lets the VM end for a reason.
func (vm *fakeVM) end(r vmm.Reason) {
	vm.become(node.Status{State: node.Ended, Exit: &vmm.Exit{Reason: r, VCPU: -1}})
	close(vm.ended)
}

func (vm *fakeVM) Wait(ctx context.Context) (*vmm.Exit, error) {
	if !vm.over() {
		select {
		case <-vm.ended:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	st, _ := vm.Status(ctx)
	if st.Exit == nil {
		return nil, failure.New(failure.VMProcessGone, "the process of vm %s died without a report", vm.record.Name)
	}
	return st.Exit, nil
}

func (vm *fakeVM) Remove(ctx context.Context, force bool) error {
	if !vm.over() && !force {
		return failure.New(failure.InvalidArgument, "vm %s is running; kill it first, or remove it by force", vm.record.Name)
	}
	vm.Kill(ctx)
	vm.removed = true
	return nil
}

func (vm *fakeVM) Snapshot(_ context.Context, name, task string) (*node.Snapshot, error) {
	if name == "full" {
		return nil, failure.New(failure.NoSpace, "write layer: no space left on device")
	}
	if name == "" {
		name = vm.record.Name + "-1"
	}
	info := vm.node.snapshots[1]
	m := *info.Manifest
	m.Name, m.Task = name, task
	info.Name, info.Manifest = name, &m
	return &node.Snapshot{Info: info, Pause: 1500 * time.Microsecond}, nil
}

func (vm *fakeVM) Fork(_ context.Context, options []node.Options) ([]Child, error) {
	if vm.over() {
		return nil, failure.New(failure.VMNotRunning, "vm %s is not running", vm.record.Name)
	}
	children := make([]Child, len(options))
	for i, o := range options {
		children[i].VM, children[i].Err = vm.node.make(o, func(r *node.Record) { r.Parent = vm.record.ID })
	}
	return children, nil
}

// Exec knows a few commands by name.
func (vm *fakeVM) Exec(ctx context.Context, c client.Command) (client.Result, error) {
	vm.got = c
	if vm.onExec != nil {
		vm.onExec()
	}
	if vm.execErr != nil {
		return client.Result{}, vm.execErr
	}
	r := client.Result{DurationMS: 7, Containment: "cgroup"}
	switch c.Args[0] {
	case "uname":
		io.WriteString(c.Stdout, "Linux guest 6.12.117\n")
	case "cat":
		io.Copy(c.Stdout, c.Stdin)
	case "noise":
		io.WriteString(c.Stdout, "\xffout")
		io.WriteString(c.Stderr, "err\n")
		r.StdoutTruncated = c.StdoutLimit > 0
	case "exit":
		fmt.Sscan(c.Args[1], &r.ExitCode)
	case "die":
		r.ExitCode, r.Signal = 137, 9
	case "slow":
		r.ExitCode, r.TimedOut = proto.ExitTimeout, true
	case "wait":
		<-ctx.Done()
		return r, &client.ConnectionError{Op: proto.OpExec, Started: true, Err: context.Cause(ctx)}
	default:
		r.ExitCode = proto.ExitNotFound
		r.Error = &client.Error{Code: proto.CodeCommandNotFound, Message: fmt.Sprintf("%q: no such command", c.Args[0])}
	}
	return r, nil
}

// fakeCommands are the detached commands that every guest of the fake has.
var fakeCommands = []client.Detached{
	{ID: "c1", Args: []string{"make", "test"}, PID: 70, Running: true, Age: 90 * time.Second, Stdout: client.Kept{From: 4096, Bytes: 9000, Lost: 4096}},
	{ID: "c2", Args: []string{"\x1b[31mred"}, PID: 71, Age: 2 * time.Hour, Result: &client.Result{ExitCode: 3, DurationMS: 5, StdoutBytes: 6}},
}

func (vm *fakeVM) Detach(ctx context.Context, c client.Command) (client.Detached, error) {
	d := client.Detached{ID: c.OperationID, Args: c.Args, PID: 72, Running: true}
	if d.ID == "" {
		d.ID = "c3"
	}
	c.Stdout, c.Stderr = io.Discard, io.Discard
	if r, err := vm.Exec(ctx, c); err != nil || r.Error != nil {
		d.Running, d.Result = false, &r
		return d, err
	}
	return d, nil
}

func (vm *fakeVM) command(id string) (client.Detached, error) {
	for _, d := range fakeCommands {
		if d.ID == id {
			return d, nil
		}
	}
	return client.Detached{}, fmt.Errorf("attach in guest: %w", &client.Error{Code: proto.CodeOperationUnknown, Message: "no detached command has the id \"" + id + "\""})
}

func (vm *fakeVM) Attach(_ context.Context, id string, a client.Attachment) (client.Detached, error) {
	d, err := vm.command(id)
	if err == nil && a.Stdout != nil {
		io.WriteString(a.Stdout, "output\n")
	}
	if err == nil && !a.Now && d.Running {
		d.Running, d.Result = false, &client.Result{}
	}
	return d, err
}

func (vm *fakeVM) Signal(_ context.Context, id string, signal int, all bool) (client.Detached, error) {
	vm.signal = fmt.Sprint(id, " ", signal, " ", all)
	return vm.command(id)
}

func (vm *fakeVM) Commands(context.Context) ([]client.Detached, error) { return fakeCommands, nil }

func (vm *fakeVM) Usage(context.Context) (client.Usage, error) {
	return client.Usage{
		UptimeMS: 90_000, CPUs: 2, BusyMS: 1500, Load1: 0.25, Tasks: 61,
		Memory: proto.MemoryUsage{TotalBytes: 1 << 30, AvailableBytes: 768 << 20},
		Root:   proto.FileSystemUsage{TotalBytes: 4 << 30, AvailableBytes: 1 << 30},
		Agent:  proto.AgentHealth{Version: "1.2.3", ResidentBytes: 5 << 20, Protected: true, Containment: "cgroup", MemoryController: true},
	}, nil
}

// Scan finds the files that the VM has, and others by the snapshot that it is of.
func (vm *fakeVM) Scan(context.Context, string) (*client.Scan, error) {
	s := &client.Scan{ScanResult: client.ScanResult{RenewedNS: 1000, RenewedTicks: 50}}
	add := func(path, contents string, ctime int64, change func(*client.ScannedFile)) {
		vm.files[path] = contents
		f := client.ScannedFile{Path: proto.Text(path), FileInfo: proto.FileInfo{Kind: proto.KindFile, Size: int64(len(contents)), Mode: 0o644}, CtimeNS: ctime}
		if change != nil {
			change(&f)
		}
		s.Files = append(s.Files, f)
	}
	add("/root/same", "same", 1, nil)
	add("/var/log/\x1b[31mlog", "x", 1001, nil)
	if vm.record.Snapshot == "a00000000001.2" {
		add("/root/random", "3", 2, nil)
	} else {
		add("/root/random", "4", 5, nil)
	}
	s.Processes = []client.ProcessInfo{
		{PID: 1, Name: "init", Args: []proto.Text{"/sbin/init"}},
		{PID: 90, Start: 51, Name: "since", Args: []proto.Text{"since"}},
	}
	if vm.record.Snapshot == "step-1" {
		add("/root/old", "1\n", 2, nil)
		add("/root/text", "a\nb\nc\n", 2, nil)
		add("/root/touched", "t", 2, nil)
		add("/root/program", "p", 2, nil)
		s.Processes = append(s.Processes, client.ProcessInfo{PID: 40, Parent: 1, Start: 9, Name: "sleep", Args: []proto.Text{"sleep", "100"}})
		return s, nil
	}
	add("/root/new", "\xff\xfe", 3, nil)
	add("/root/text", "a\nx\nc\n", 3, nil)
	add("/root/touched", "t", 3, nil)
	add("/root/program", "p", 3, func(f *client.ScannedFile) { f.Mode, f.UID = 0o4755, 7 })
	s.Processes = append(s.Processes, client.ProcessInfo{PID: 41, Parent: 1, Start: 12, Name: "\x1bmake"})
	return s, nil
}

// WaitFor finds that files are missing.
func (vm *fakeVM) WaitFor(_ context.Context, conditions ...client.Condition) error {
	missing := &client.NotReadyError{}
	for _, c := range conditions {
		if c.Kind == client.ReadyFile {
			missing.Missing = append(missing.Missing, client.Missing{Condition: c, Reason: "no such file"})
		}
	}
	if len(missing.Missing) == 0 {
		return nil
	}
	return missing
}

// Relay says where a connection would go.
func (vm *fakeVM) Relay(_ context.Context, conn client.HalfConn, network, address string) error {
	defer conn.Close()
	_, err := fmt.Fprintf(conn, "%s %s of %s\n", network, address, vm.record.Name)
	return err
}

func (vm *fakeVM) Put(_ context.Context, f client.File, r io.Reader) (int64, error) {
	if f.Path == "/root" {
		return 0, fmt.Errorf("put in guest: %w", &client.Error{Code: proto.CodeIsADirectory, Message: "/root is a directory"})
	}
	data, err := io.ReadAll(r)
	vm.files[f.Path] = string(data)
	return int64(len(data)), err
}

// Trees are kept as tar streams would unpack: by the names of their files.
func (vm *fakeVM) Stat(_ context.Context, path string) (client.File, error) {
	if _, found := vm.files[path]; found {
		return client.File{Path: path, Kind: client.KindFile}, nil
	}
	for name := range vm.files {
		if strings.HasPrefix(name, path+"/") {
			return client.File{Path: path, Kind: client.KindDirectory}, nil
		}
	}
	return client.File{}, fmt.Errorf("stat in guest: %w", &client.Error{Code: proto.CodeFileNotFound, Message: path + ": no such file"})
}

func (vm *fakeVM) PutTree(_ context.Context, dir string, r io.Reader, _ bool) (client.TreeStats, error) {
	data, err := io.ReadAll(r)
	vm.files[dir+"/tree"] = string(data)
	return client.TreeStats{}, err
}

// fakeGuest is a fakeVM's guest: some things are called the same there.
type fakeGuest struct{ *fakeVM }

func (g fakeGuest) Remove(_ context.Context, path string, _ bool) error {
	delete(g.files, path)
	return nil
}

func (vm *fakeVM) Move(_ context.Context, from, to string) error {
	vm.files[to] = vm.files[from]
	delete(vm.files, from)
	return nil
}

func (vm *fakeVM) Upload(_ context.Context, from *os.Root, dir string, _ bool) (stats client.TreeStats, err error) {
	err = fs.WalkDir(from.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := from.ReadFile(name)
		vm.files[dir+"/"+name] = string(data)
		stats.Bytes += int64(len(data))
		return err
	})
	return stats, err
}

func (vm *fakeVM) Download(_ context.Context, dir string, to *os.Root) (stats client.TreeStats, err error) {
	for name, data := range vm.files {
		if rest, in := strings.CutPrefix(name, dir+"/"); in {
			stats.Bytes += int64(len(data))
			err = errors.Join(err, to.MkdirAll(filepath.Dir(rest), 0o755), to.WriteFile(rest, []byte(data), 0o644))
		}
	}
	return stats, err
}

func (vm *fakeVM) Get(_ context.Context, path string, w io.Writer) (client.File, error) {
	data, found := vm.files[path]
	if at, err := vm.Stat(context.Background(), path); !found && err == nil && at.Kind == client.KindDirectory {
		return client.File{}, fmt.Errorf("get in guest: %w", &client.Error{Code: proto.CodeIsADirectory, Message: path + " is a directory"})
	}
	if !found {
		return client.File{}, fmt.Errorf("get in guest: %w", &client.Error{Code: proto.CodeFileNotFound, Message: path + ": no such file"})
	}
	io.WriteString(w, data)
	return client.File{Path: path, Mode: 0o4755, Size: int64(len(data))}, nil
}

// Judge and TryTask give the verdicts that a test has named.
func (vm *fakeVM) Judge(_ context.Context, r node.Judging) (*judge.Verdict, error) {
	vm.mu.Lock()
	defer vm.mu.Unlock()
	decided := r.Decided
	r.Decided = nil
	vm.judged = append(vm.judged, r)
	if len(vm.verdicts) == 0 {
		return nil, failure.New(failure.VMNotRunning, "vm %s is not running", vm.record.Name)
	}
	v := vm.verdicts[0]
	vm.verdicts = append(vm.verdicts[1:], v)
	decided(v)
	return v, nil
}

func (n *fakeNode) TryTask(_ context.Context, t node.Trial) (*judge.Trial, error) {
	n.tried = append(n.tried, t)
	return n.trial, nil
}
