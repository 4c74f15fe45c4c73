package judge

import (
	"context"
	"io"

	"github.com/forkvm/forkvm/agent/client"
)

// Machines makes the machines in which is judged.
type Machines interface {
	// Fork makes a copy of the rollout as it is now; the rollout goes on.
	Fork(ctx context.Context) (Machine, error)
	// Clean makes a new machine from the task's own snapshot.
	Clean(ctx context.Context) (Machine, error)
}

// Machine is one of them.
type Machine interface {
	// ID is for the evidence.
	ID() string
	Guest() Guest
	// Health says whether the machine can still be relied on.
	Health(ctx context.Context) Health
	// NoteUse is called when all is done in a clean machine in which the verifier has run:
	// what such machines use can be made ready in later ones, which are slower without.
	NoteUse()
	// Close ends the machine and leaves nothing of it.
	Close() error
}

// Health is the state of a machine.
type Health struct {
	// Ended is why the guest's life is over, empty while it lives.
	Ended string
	// ByGuest: the guest brought its end about itself.
	ByGuest bool
	// Storage is the last error of the host's storage that the guest ran into.
	Storage error
}

// Guest is what is asked of a guest agent; see client.Client.
type Guest interface {
	Processes
	Trees
	Files
}

// Processes runs and ends programs.
type Processes interface {
	Exec(ctx context.Context, c client.Command) (client.Result, error)
	Survey(ctx context.Context, l client.Look) (client.Survey, error)
	Quiesce(ctx context.Context, q client.Quiescence) (client.Quieted, error)
}

// Trees moves directories.
type Trees interface {
	PlaceTree(ctx context.Context, p client.Placement, r io.Reader) (client.TreeStats, error)
	GetExactTree(ctx context.Context, dir string, w io.Writer) (client.TreeStats, error)
	Vacate(ctx context.Context, directories ...client.EmptyDirectory) (client.Vacated, error)
}

// Files looks at files and takes them away.
type Files interface {
	Get(ctx context.Context, path string, w io.Writer) (client.File, error)
	Stat(ctx context.Context, path string) (client.File, error)
	List(ctx context.Context, dir string) ([]client.File, error)
	Remove(ctx context.Context, path string, recursive bool) error
}

var _ Guest = (*client.Client)(nil)
