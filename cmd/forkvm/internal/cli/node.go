package cli

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/snapshot/archive"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// Node is what the verbs need of a machine with VMs.
type Node interface {
	Machines
	Snapshots
	Archives
	Images
	Rollouts
}

// Machines makes and finds VMs.
type Machines interface {
	Boot(ctx context.Context, image string, o node.Options) (VM, error)
	Restore(ctx context.Context, snapshot string, o node.Options) (VM, error)
	List() ([]VM, error)
	Find(ref string) (VM, error)
	TryTask(ctx context.Context, t node.Trial) (*judge.Trial, error)
	// Prepare is node.Node.Prepare.
	Prepare(ctx context.Context, w node.Waiting) (int, error)
}

// Snapshots keeps frozen VMs.
type Snapshots interface {
	Snapshots() ([]store.Info, error)
	InspectSnapshot(name string) (store.Info, error)
	CheckSnapshot(ctx context.Context, name string, v *store.Verification) error
	DiffSnapshots(ctx context.Context, a, b string) (*store.Difference, error)
	RemoveSnapshot(name string) error
}

// Archives brings snapshots out of the node and into it. Progress may be nil.
type Archives interface {
	ExportSnapshot(ctx context.Context, name string, w io.Writer, progress func(bytes int64)) (archive.Result, error)
	ArchiveSnapshot(ctx context.Context, name, dir string, progress func(bytes int64)) (archive.Result, error)
	ImportSnapshot(ctx context.Context, r io.Reader, as string, progress func(bytes int64)) (store.Info, error)
	RemoveArchived(ctx context.Context, dir, name string) error
	UnarchiveSnapshot(ctx context.Context, dir, name, as string, progress func(bytes int64)) (store.Info, error)
}

// Rollouts keeps what was done to VMs, also to those that are gone.
type Rollouts interface {
	Rollouts() ([]Rollout, error)
	FindRollout(ref string) (Rollout, error)
}

// Rollout is the course of one VM.
type Rollout interface {
	// ID is the VM's.
	ID() string
	Journal() (*journal.File, error)
	// Kept is what is kept of contents that the journal speaks of.
	Kept(c *journal.Contents) ([]byte, error)
	// Steps names the snapshots behind its operations.
	Steps() ([]string, error)
	Remove() error
}

var _ Rollout = (*node.Rollout)(nil)

// Images keeps what VMs boot from.
type Images interface {
	Images() ([]Image, error)
	BuildImage(ctx context.Context, name string, c image.Config) (Image, error)
	RemoveImage(name string) error
}

// Image is one entry of a listing: a manifest, or why there is none.
type Image struct {
	Name     string
	Manifest image.Manifest
	Err      error
}

// VM is one VM of a Node.
type VM interface {
	Life
	Copier
	Record() node.Record
	Guest() Guest
	// Paths of what belongs to the VM on the host.
	Paths() Paths
}

// Paths say where a VM's files are.
type Paths struct{ Directory, Console, Vsock string }

// Life is what can be asked of a VM's process.
type Life interface {
	Status(ctx context.Context) (*node.Status, error)
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	Reset(ctx context.Context, o node.ResetOptions) (time.Duration, error)
	Kill(ctx context.Context) error
	Wait(ctx context.Context) (*vmm.Exit, error)
	Remove(ctx context.Context, force bool) error
	// SetNetwork replaces what the VM may reach.
	SetNetwork(ctx context.Context, p policy.Policy) error
	NetworkStatus(ctx context.Context) (*machine.NetworkStatus, error)
	// KernelRefused says what the kernel has refused to the VM's process, nil if it does not enforce the policy.
	KernelRefused() (*egress.Refused, error)
}

// Copier makes more of a VM.
type Copier interface {
	// Snapshot makes up a name if it is given none.
	Snapshot(ctx context.Context, name, task string) (*node.Snapshot, error)
	Fork(ctx context.Context, children []node.Options) ([]Child, error)
	// Judge judges copies of the VM.
	Judge(ctx context.Context, r node.Judging) (*judge.Verdict, error)
}

// Child is one result of a fork or of several restores: a VM, or why there is
// none.
type Child struct {
	VM  VM
	Err error
}

// Guest is what can be asked of a VM's guest agent.
type Guest interface {
	Commands
	Files
	Usage(ctx context.Context) (client.Usage, error)
	Scan(ctx context.Context, dir string) (*client.Scan, error)
	// WaitFor waits until the guest has reached some conditions.
	WaitFor(ctx context.Context, conditions ...client.Condition) error
	// Relay connects conn with a socket in the guest.
	Relay(ctx context.Context, conn client.HalfConn, network, address string) error
}

// Commands runs commands in a guest.
type Commands interface {
	Exec(ctx context.Context, c client.Command) (client.Result, error)
	Detach(ctx context.Context, c client.Command) (client.Detached, error)
	Attach(ctx context.Context, id string, a client.Attachment) (client.Detached, error)
	Signal(ctx context.Context, id string, signal int, all bool) (client.Detached, error)
	Commands(ctx context.Context) ([]client.Detached, error)
}

// Files moves files into a guest and out of it.
type Files interface {
	Put(ctx context.Context, f client.File, r io.Reader) (int64, error)
	Get(ctx context.Context, path string, w io.Writer) (client.File, error)
	Stat(ctx context.Context, path string) (client.File, error)
	PutTree(ctx context.Context, dir string, r io.Reader, owners bool) (client.TreeStats, error)
	Remove(ctx context.Context, path string, recursive bool) error
	Move(ctx context.Context, from, to string) error
	Upload(ctx context.Context, from *os.Root, dir string, owners bool) (client.TreeStats, error)
	Download(ctx context.Context, dir string, to *os.Root) (client.TreeStats, error)
}

var _ Guest = (*client.Client)(nil)
