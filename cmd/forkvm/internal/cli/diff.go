package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

// diffView says what two snapshots hold differently.
type diffView struct {
	Schema    string     `json:"schema"`
	A         string     `json:"a"`
	B         string     `json:"b"`
	UnitBytes int        `json:"unit_bytes"`
	Memory    diffPart   `json:"memory"`
	Disks     []diffPart `json:"disks"`
	// What programs see; not there with --blocks.
	*stateDiff
}

// diffPart is the difference of the memories or of one disk, in pages or blocks.
type diffPart struct {
	Disk    string      `json:"disk,omitempty"`
	Changed uint64      `json:"changed"`
	Ranges  []diffRange `json:"ranges"`
}

type diffRange struct {
	Start uint64 `json:"start"`
	Count uint64 `json:"count"`
}

func viewOfDifference(a, b string, d *store.Difference) diffView {
	v := diffView{Schema: "forkvm/diff/v1", A: a, B: b, UnitBytes: layer.UnitSize, Memory: viewOfRanges("", d.Memory), Disks: []diffPart{}}
	for _, disk := range d.Disks {
		v.Disks = append(v.Disks, viewOfRanges(disk.ID, disk.Blocks))
	}
	return v
}

func viewOfRanges(disk string, ranges []layer.Range) diffPart {
	p := diffPart{Disk: disk, Ranges: make([]diffRange, len(ranges))}
	for i, r := range ranges {
		p.Changed += r.Count
		p.Ranges[i] = diffRange(r)
	}
	return p
}

func (a *app) diffVerb() *cobra.Command {
	var blocks, texts bool
	cmd := &cobra.Command{
		Use:   "diff [flags] SNAPSHOT SNAPSHOT",
		Short: "Say what differs between two snapshots: pages, blocks, files, processes",
		Long: "Say what differs between two snapshots or steps of rollouts. Pages of memory and blocks\n" +
			"of disks are compared as they are stored; files and processes in a VM that is made of\n" +
			"each, for as long as that takes.",
		Example: "  forkvm diff step-3 step-4\n  forkvm diff attempt-7@12 attempt-7@14 -p\n  forkvm diff step-3 step-4 --blocks -o json",
		Args:    needs("SNAPSHOT", "SNAPSHOT"),
	}
	cmd.Flags().BoolVar(&blocks, "blocks", false, "compare pages and blocks only, and start no VM")
	cmd.Flags().BoolVarP(&texts, "patch", "p", false, "show what differs in files that are text")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, names []string) error {
		if blocks && texts {
			return usagef("--patch is about files, and --blocks leaves them out")
		}
		var d *store.Difference
		var states *stateDiff
		err := a.spin("comparing", func() (err error) {
			if d, err = n.DiffSnapshots(ctx, names[0], names[1]); err == nil && !blocks {
				states, err = a.diffStates(ctx, n, [2]string(names), texts)
			}
			return err
		})
		if err != nil {
			return err
		}
		v := viewOfDifference(names[0], names[1], d)
		v.stateDiff = states
		if a.format.Machine() {
			return output.WriteObject(a.Stdout, a.format, v)
		}
		return a.printDifference(v)
	})
	return a.withOutput(cmd)
}

func (a *app) printDifference(v diffView) error {
	parts := output.List[diffPart]{
		Header: []string{"WHAT", "CHANGED", "SIZE", "RANGES"},
		Row: func(p diffPart) []string {
			what, unit := "memory", "pages"
			if p.Disk != "" {
				what, unit = "disk "+p.Disk, "blocks"
			}
			return []string{what, fmt.Sprintf("%d %s", p.Changed, unit), output.Size(int64(p.Changed) * layer.UnitSize), fmt.Sprint(len(p.Ranges))}
		},
		Name: func(p diffPart) string {
			if p.Disk != "" {
				return p.Disk
			}
			return "memory"
		},
	}
	for _, p := range append([]diffPart{v.Memory}, v.Disks...) {
		if a.format != output.Name || p.Changed > 0 {
			parts.Items = append(parts.Items, p)
		}
	}
	if err := parts.Write(a.Stdout, a.format); err != nil || v.stateDiff == nil {
		return err
	}
	if a.format == output.Name {
		for _, f := range v.Files {
			fmt.Fprintln(a.Stdout, output.Visible(f.Path))
		}
		return nil
	}
	return a.printStates(v.stateDiff)
}
