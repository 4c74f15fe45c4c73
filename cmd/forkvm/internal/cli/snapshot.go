package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

func (a *app) snapshotVerbs() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Take, list, show and remove snapshots",
		Args:  cobra.ArbitraryArgs,
		RunE:  groupHelp,
	}
	cmd.AddCommand(a.takeVerb(), a.snapshotListVerb(), a.snapshotInspectVerb(), a.snapshotVerifyVerb(), a.snapshotRemoveVerb())
	return cmd
}

// snapshotView is a snapshot as the command line lists it. inspect has all of it.
type snapshotView struct {
	Schema      string    `json:"schema"`
	Name        string    `json:"name"`
	ID          string    `json:"id"`
	Created     time.Time `json:"created,omitzero"`
	Parent      string    `json:"parent,omitempty"`
	Task        string    `json:"task,omitempty"`
	Image       string    `json:"image,omitempty"`
	CPUs        int       `json:"cpus"`
	MemoryBytes uint64    `json:"memory_bytes"`
	// SizeBytes is what its files hold, layers that others share included.
	SizeBytes    int64 `json:"size_bytes"`
	MemoryLayers int   `json:"memory_layers"`
	// PauseMS is how long the guest stood still, of a snapshot just taken.
	PauseMS *float64       `json:"pause_ms,omitempty"`
	Error   *failure.Error `json:"error,omitempty"`
}

const snapshotSchema = "forkvm/snapshot-summary/v1"

func viewOfSnapshot(s store.Info) snapshotView {
	v := snapshotView{Schema: snapshotSchema, Name: s.Name}
	if s.Err != nil {
		v.Error = damage(s.Err)
	}
	m := s.Manifest
	if m == nil {
		return v
	}
	v.ID, v.Created, v.Parent, v.Task, v.Image = m.ID, m.Created.UTC(), m.Parent, m.Task, m.Image
	v.CPUs, v.MemoryBytes, v.MemoryLayers = m.Guest.CPUs, m.Guest.MemoryBytes, len(m.Memory)
	v.SizeBytes = m.State.Bytes
	for _, l := range m.Memory {
		v.SizeBytes += l.Bytes
	}
	for _, d := range m.Disks {
		for _, l := range d.Layers {
			v.SizeBytes += l.Bytes
		}
	}
	return v
}

// damage is what is wrong with a snapshot that is listed.
func damage(err error) *failure.Error {
	if errors.Is(err, snapshot.ErrVersion) {
		return failure.New(failure.SnapshotUnsupported, "%w", err)
	}
	var corrupt *store.CorruptError
	if errors.As(err, &corrupt) {
		return failure.New(failure.SnapshotCorrupt, "%w", err)
	}
	return explain(err)
}

func (a *app) takeVerb() *cobra.Command {
	var task string
	cmd := &cobra.Command{
		Use:     "take [flags] VM NAME",
		Short:   "Freeze a running VM as a snapshot; the VM goes on",
		Example: "  forkvm snapshot take vm-1 task-1 --task fix-the-parser",
		Args:    needs("VM", "NAME"),
	}
	cmd.Flags().StringVar(&task, "task", "", "the task that it is for; noted in the snapshot")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if err := snapshot.CheckName(args[1]); err != nil {
			return failure.New(failure.InvalidArgument, "snapshot name %q: %w", args[1], err)
		}
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		taken, err := vm.Snapshot(ctx, args[1], task)
		if err != nil {
			return err
		}
		if !a.format.Machine() {
			_, err := fmt.Fprintln(a.Stdout, args[1])
			return err
		}
		v := viewOfSnapshot(store.Info{Name: args[1], Manifest: taken.Manifest})
		pause := float64(taken.Pause) / float64(time.Millisecond)
		v.PauseMS = &pause
		return output.WriteObject(a.Stdout, a.format, v)
	})
	return a.withOutput(cmd)
}

func (a *app) snapshotListVerb() *cobra.Command {
	cmd := &cobra.Command{Use: "ls [flags]", Aliases: []string{"list"}, Short: "List snapshots", Args: needs()}
	cmd.RunE = a.onNode(func(_ context.Context, n Node, _ []string) error {
		all, err := n.Snapshots()
		if err != nil {
			return err
		}
		var views []snapshotView
		for _, s := range all {
			views = append(views, viewOfSnapshot(s))
		}
		return show(a, a.snapshotList(views))
	})
	a.withQuiet(cmd, "print names only")
	a.withTemplate(cmd)
	return a.withOutput(cmd)
}

func (a *app) snapshotList(views []snapshotView) output.List[snapshotView] {
	now := a.Now()
	return output.List[snapshotView]{
		Header: []string{"NAME", "TASK", "IMAGE", "CPUS", "MEMORY", "SIZE", "CREATED"},
		Row: func(v snapshotView) []string {
			if v.Error != nil {
				return []string{v.Name, "", "", "", "", "", string(v.Error.Code)}
			}
			return []string{
				v.Name, v.Task, v.Image, strconv.Itoa(v.CPUs), output.Size(int64(v.MemoryBytes)),
				output.Size(v.SizeBytes), output.Age(now.Sub(v.Created)),
			}
		},
		Name:  func(v snapshotView) string { return v.Name },
		Items: views,
	}
}

func (a *app) snapshotInspectVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect [flags] NAME...",
		Short: "Show snapshots' manifests, as a JSON array",
		Args:  needs("NAME..."),
	}
	cmd.RunE = a.onNode(func(_ context.Context, n Node, names []string) error {
		l := output.List[*snapshot.Manifest]{Name: func(m *snapshot.Manifest) string { return m.Name }}
		failed := a.each(names, func(name string) error {
			m, err := n.SnapshotManifest(name)
			if err == nil {
				l.Items = append(l.Items, m)
			}
			return err
		})
		if a.template != "" {
			return errors.Join(l.WriteTemplate(a.Stdout, a.template), failed)
		}
		return errors.Join(l.Write(a.Stdout, output.JSON), failed)
	})
	return a.withTemplate(cmd)
}

func (a *app) snapshotRemoveVerb() *cobra.Command {
	return a.namedVerb("rm NAME...", "Remove snapshots; VMs made from them go on",
		func(_ context.Context, n Node, name string) error { return n.RemoveSnapshot(name) })
}

func (a *app) snapshotVerifyVerb() *cobra.Command {
	return a.namedVerb("verify NAME...", "Read all of a snapshot and compare it with its checksums",
		func(ctx context.Context, n Node, name string) error { return n.VerifySnapshot(ctx, name) })
}

// namedVerb is a verb that does one thing to each name that it is given, and
// prints the name when it is done.
func (a *app) namedVerb(use, short string, do func(context.Context, Node, string) error) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: needs("NAME...")}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, names []string) error {
		return a.each(names, func(name string) error {
			if err := do(ctx, n, name); err != nil {
				return err
			}
			_, err := fmt.Fprintln(a.Stdout, name)
			return err
		})
	})
	return cmd
}
