package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

func (a *app) snapshotVerbs() *cobra.Command {
	var task string
	var ready readyFlags
	cmd := &cobra.Command{
		Use:   "snapshot [flags] VM [NAME]",
		Short: "Freeze a running VM as a snapshot; the VM goes on",
		Example: "  forkvm snapshot vm-1\n  forkvm snapshot vm-1 task-1 --task fix-the-parser\n" +
			"  forkvm snapshot vm-1 task-1 --ready unit:postgresql --ready port:5432\n  forkvm snapshot ls",
		Args: upTo("VM", "NAME"),
	}
	cmd.Flags().StringVar(&task, "task", "", "the task that it is for; noted in the snapshot")
	ready.add(cmd.Flags())
	take := a.onNode(func(ctx context.Context, n Node, args []string) error {
		name := ""
		if len(args) > 1 {
			name = args[1]
			if err := snapshot.CheckName(name); err != nil {
				return failure.New(failure.InvalidArgument, "snapshot name %q: %w", name, err)
			}
		}
		conditions, err := ready.parse()
		if err != nil {
			return err
		}
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		if err := ready.wait(ctx, vm, conditions); err != nil {
			return err
		}
		return a.takeSnapshot(ctx, vm, name, task)
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return take(cmd, args)
	}
	cmd.AddCommand(a.snapshotListVerb(), a.snapshotInspectVerb(), a.snapshotCheckVerb(), a.exportVerb(), a.importVerb(), a.snapshotRemoveVerb())
	return a.withOutput(cmd)
}

func (a *app) takeSnapshot(ctx context.Context, vm VM, name, task string) error {
	taken, err := vm.Snapshot(ctx, name, task)
	if err != nil {
		return err
	}
	if !a.format.Machine() {
		_, err := fmt.Fprintln(a.Stdout, taken.Info.Name)
		return err
	}
	v := viewOfSnapshot(taken.Info)
	pause := float64(taken.Pause) / float64(time.Millisecond)
	v.PauseMS = &pause
	return output.WriteObject(a.Stdout, a.format, v)
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
	snapshotSizes
	MemoryLayers int `json:"memory_layers"`
	// PauseMS is how long the guest stood still, of a snapshot just taken.
	PauseMS *float64       `json:"pause_ms,omitempty"`
	Error   *failure.Error `json:"error,omitempty"`
}

// snapshotSizes are the space that a snapshot's files occupy. Removing it gives
// OwnBytes back; the rest is in files that others have too.
type snapshotSizes struct {
	OwnBytes    int64 `json:"own_bytes"`
	SharedBytes int64 `json:"shared_bytes"`
	TotalBytes  int64 `json:"total_bytes"`
}

func viewOfSizes(s store.Sizes) snapshotSizes {
	return snapshotSizes{OwnBytes: s.Own, SharedBytes: s.Shared, TotalBytes: s.Total()}
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
	v.snapshotSizes = viewOfSizes(s.Sizes)
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

func (a *app) snapshotListVerb() *cobra.Command {
	var steps bool
	list := func(n Node) ([]store.Info, error) {
		all, err := n.Snapshots()
		if !steps {
			all = slices.DeleteFunc(slices.Clone(all), isStep)
		}
		return all, err
	}
	cmd := namesVerb(a, "List snapshots", list, viewOfSnapshot, a.snapshotList)
	cmd.Flags().BoolVar(&steps, "steps", false, "list those that were taken behind each step of recorded rollouts, too")
	return cmd
}

// isStep says whether a snapshot belongs to a rollout.
func isStep(s store.Info) bool { return node.IsStep(s.Name) }

func (a *app) snapshotList(views []snapshotView) output.List[snapshotView] {
	now := a.Now()
	return output.List[snapshotView]{
		Header: []string{"NAME", "TASK", "IMAGE", "CPUS", "MEMORY", "OWN", "TOTAL", "CREATED"},
		Row: func(v snapshotView) []string {
			if v.Error != nil {
				return []string{v.Name, "", "", "", "", "", "", string(v.Error.Code)}
			}
			return []string{
				v.Name, v.Task, v.Image, strconv.Itoa(v.CPUs), output.Size(int64(v.MemoryBytes)),
				output.Size(v.OwnBytes), output.Size(v.TotalBytes), output.Age(now.Sub(v.Created)),
			}
		},
		Name:  func(v snapshotView) string { return v.Name },
		Items: views,
	}
}

// snapshotDetails is all that is known of a snapshot.
type snapshotDetails struct {
	Schema string `json:"schema"`
	Name   string `json:"name"`
	snapshotSizes
	// VMs have this as the snapshot that they last took or came from.
	VMs      []vmAt             `json:"vms"`
	Manifest *snapshot.Manifest `json:"manifest"`
}

func (a *app) snapshotInspectVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "inspect [flags] NAME...",
		Short: "Show sizes, VMs and manifests of snapshots, as a JSON array",
		Args:  needs("NAME..."),
	}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, names []string) error {
		vms, err := n.List()
		if err != nil {
			return err
		}
		asItIs := func(lineage []string) []string { return lineage }
		at := placeVMs(ctx, vms, asItIs, func(string) bool { return true })
		l := output.List[snapshotDetails]{Name: func(d snapshotDetails) string { return d.Name }}
		failed := a.each(names, func(name string) error {
			info, err := n.InspectSnapshot(name)
			if err == nil {
				l.Items = append(l.Items, snapshotDetails{
					Schema: "forkvm/snapshot-details/v1", Name: name, snapshotSizes: viewOfSizes(info.Sizes),
					VMs: append([]vmAt{}, at[info.Manifest.ID]...), Manifest: info.Manifest,
				})
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
	var dir string
	cmd := a.namedVerb("rm [flags] NAME...", "Remove snapshots; VMs made from them go on",
		func(ctx context.Context, n Node, name string) error {
			if dir != "" {
				return n.RemoveArchived(ctx, dir, name)
			}
			return n.RemoveSnapshot(name)
		})
	cmd.Flags().StringVar(&dir, "from", "", "remove them from an archive directory instead")
	return cmd
}

// namesVerb is a verb that lists things that have names.
func namesVerb[T, V any](a *app, short string, all func(Node) ([]T, error), view func(T) V, list func([]V) output.List[V]) *cobra.Command {
	cmd := &cobra.Command{Use: "ls [flags]", Aliases: []string{"list"}, Short: short, Args: needs()}
	cmd.RunE = a.onNode(func(_ context.Context, n Node, _ []string) error {
		things, err := all(n)
		if err != nil {
			return err
		}
		var views []V
		for _, t := range things {
			views = append(views, view(t))
		}
		return show(a, list(views))
	})
	a.withQuiet(cmd, "print names only")
	a.withTemplate(cmd)
	return a.withOutput(cmd)
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
