package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/snapshot/store"
)

// treeView is the snapshots and VMs of a node by what grew from what.
type treeView struct {
	Schema string `json:"schema"`
	// Nodes are in the order in which a tree is printed: each before its children.
	Nodes []treeNode `json:"nodes"`
	// VMs are those that stand on no snapshot of the tree.
	VMs []vmAt `json:"vms"`
}

// treeNode is one snapshot.
type treeNode struct {
	Schema string `json:"schema"`
	Name   string `json:"name"`
	ID     string `json:"id"`
	// Parent is the name of the nearest ancestor that still exists.
	Parent string `json:"parent,omitempty"`
	// ParentRemoved: the snapshot that it grew from is not there any more.
	ParentRemoved bool      `json:"parent_removed,omitempty"`
	Depth         int       `json:"depth"`
	Created       time.Time `json:"created,omitzero"`
	Task          string    `json:"task,omitempty"`
	snapshotSizes
	// VMs have this as the snapshot that they last took or came from.
	VMs   []vmAt         `json:"vms"`
	Error *failure.Error `json:"error,omitempty"`

	children []*treeNode
}

// vmAt is a VM at its place in the tree.
type vmAt struct {
	ID    string     `json:"id"`
	Name  string     `json:"name"`
	State node.State `json:"state"`
}

// placeVMs tells where the VMs that have not ended are, by the ID of the nearest
// snapshot that they stand on, in their lineage as stands has it, and that exists. Those that stand on none are at "".
func placeVMs(ctx context.Context, vms []VM, stands func(lineage []string) []string, exists func(id string) bool) map[string][]vmAt {
	lineage := make(map[string][]string, len(vms))
	for _, vm := range vms {
		r := vm.Record()
		lineage[r.ID] = stands(r.Lineage)
	}
	at := map[string][]vmAt{}
	for _, v := range lookAtAll(ctx, vms, false) {
		place := nearest(lineage[v.ID], exists)
		at[place] = append(at[place], vmAt{ID: v.ID, Name: v.Name, State: v.State})
	}
	return at
}

// nearest is the first of the IDs that exists, or "".
func nearest(ids []string, exists func(id string) bool) string {
	for _, id := range ids {
		if exists(id) {
			return id
		}
	}
	return ""
}

// forest is the snapshots, linked with what they grew from. Steps of rollouts are
// passed over.
type forest struct {
	nodes []*treeNode // oldest first
	byID  map[string]*treeNode
	steps map[string][]string // what each step stands on, by its ID
}

func newForest(snapshots []store.Info) *forest {
	f := &forest{byID: make(map[string]*treeNode, len(snapshots)), steps: map[string][]string{}}
	lineage := make(map[*treeNode][]string, len(snapshots))
	for _, s := range snapshots {
		if isStep(s) {
			if s.Err == nil {
				f.steps[s.Manifest.ID] = s.Manifest.Lineage()[1:]
			}
			continue
		}
		n := &treeNode{Schema: "forkvm/tree-node/v1", Name: s.Name, snapshotSizes: viewOfSizes(s.Sizes), VMs: []vmAt{}}
		f.nodes = append(f.nodes, n)
		if s.Err != nil {
			n.Error = damage(s.Err)
			continue
		}
		n.ID, n.Created, n.Task = s.Manifest.ID, s.Manifest.Created.UTC(), s.Manifest.Task
		f.byID[n.ID], lineage[n] = n, s.Manifest.Lineage()[1:]
	}
	slices.SortStableFunc(f.nodes, func(a, b *treeNode) int { return a.Created.Compare(b.Created) })
	for _, n := range f.nodes {
		stands := f.withoutSteps(lineage[n])
		parent := f.byID[nearest(stands, f.exists)]
		if parent != nil {
			n.Parent = parent.Name
			parent.children = append(parent.children, n)
		}
		n.ParentRemoved = len(stands) > 0 && !f.exists(stands[0])
	}
	return f
}

// withoutSteps is a lineage in which what a step stands on is in its place: that
// reaches further back than the lineage of who stands on the step.
func (f *forest) withoutSteps(lineage []string) []string {
	seen := map[string]bool{}
	for len(lineage) > 0 && !seen[lineage[0]] {
		below, step := f.steps[lineage[0]]
		if !step {
			break
		}
		seen[lineage[0]] = true
		lineage = below
	}
	return lineage
}

func (f *forest) exists(id string) bool { return f.byID[id] != nil }

// walk calls visit for each node below top, or below those that grew from
// nothing, each before its children. What manifests say may go round in a circle;
// no node is visited twice.
func (f *forest) walk(top string, visit func(n *treeNode)) {
	seen := map[*treeNode]bool{}
	var down func(n *treeNode, depth int)
	down = func(n *treeNode, depth int) {
		if seen[n] {
			return
		}
		seen[n], n.Depth = true, depth
		visit(n)
		for _, child := range n.children {
			down(child, depth+1)
		}
	}
	for _, n := range f.nodes {
		if n.Name == top || top == "" && n.Parent == "" {
			down(n, 0)
		}
	}
	if top == "" {
		for _, n := range f.nodes { // circles have no beginning
			down(n, 0)
		}
	}
}

func (a *app) treeVerb() *cobra.Command {
	var svg string
	cmd := &cobra.Command{
		Use:   "tree [flags] [SNAPSHOT|ROLLOUT]",
		Short: "Show what grew from what: snapshots and VMs, or rollouts with their rewards",
		Long: "Show what grew from what: snapshots, and the VMs that stand on them; or a rollout and\n" +
			"those that were forked from it or began from its snapshots and steps, with their\n" +
			"rewards, whether their VMs are still there or not.",
		Example: "  forkvm tree\n  forkvm tree task-1\n  forkvm tree attempt-7 --svg tree.svg",
		Args:    upTo("SNAPSHOT"),
	}
	cmd.Flags().StringVar(&svg, "svg", "", "draw the tree of a rollout into this file instead")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		top := ""
		if len(args) == 1 {
			top = args[0]
		}
		r, err := rolloutIn(n, top)
		switch {
		case err != nil:
			return err
		case r != nil:
			return a.showRolloutTree(ctx, n, r, svg)
		case svg != "":
			return usagef("--svg draws the tree of a rollout")
		}
		v, err := lookAtTree(ctx, n, top)
		if err != nil {
			return err
		}
		switch {
		case a.format == output.JSON:
			return output.WriteJSON(a.Stdout, v)
		case a.format == output.Table:
			return a.drawTree(v)
		}
		return output.List[treeNode]{Name: func(n treeNode) string { return n.Name }, Items: v.Nodes}.Write(a.Stdout, a.format)
	})
	return a.withOutput(cmd)
}

// rolloutIn is the rollout that a tree is asked for, nil if it is a snapshot or
// nothing.
func rolloutIn(n Node, top string) (Rollout, error) {
	if top == "" {
		return nil, nil
	}
	_, err := n.InspectSnapshot(top)
	if !failure.Is(err, failure.SnapshotNotFound) {
		return nil, nil // it is there, perhaps damaged
	}
	r, missing := n.FindRollout(top)
	if failure.Is(missing, failure.RolloutNotFound) {
		return nil, err
	}
	return r, missing
}

func lookAtTree(ctx context.Context, n Node, top string) (treeView, error) {
	v := treeView{Schema: "forkvm/tree/v1", Nodes: []treeNode{}, VMs: []vmAt{}}
	if top != "" {
		if _, err := n.InspectSnapshot(top); err != nil {
			return v, err
		}
	}
	snapshots, err := n.Snapshots()
	if err != nil {
		return v, err
	}
	vms, err := n.List()
	if err != nil {
		return v, err
	}
	f := newForest(snapshots)
	at := placeVMs(ctx, vms, f.withoutSteps, f.exists)
	f.walk(top, func(n *treeNode) {
		if n.ID != "" {
			n.VMs = append(n.VMs, at[n.ID]...)
		}
		v.Nodes = append(v.Nodes, *n)
	})
	if top == "" {
		v.VMs = append(v.VMs, at[""]...)
	}
	return v, nil
}

// drawTree prints the tree with a line for each snapshot and each VM. A row of
// snapshots that grew from each other goes straight down, so that a hundred steps
// still fit on a screen; it moves to the right where there is a choice.
func (a *app) drawTree(v treeView) error {
	d := drawing{out: tabwriter.NewWriter(a.Stdout, 0, 0, 3, ' ', 0), nodes: v.Nodes, now: a.Now()}
	for len(d.nodes) > 0 {
		d.draw("", "")
	}
	for _, vm := range v.VMs {
		d.line("* "+vm.Name, string(vm.State), "")
	}
	return d.out.Flush()
}

// drawing prints nodes, which are in the order of walk.
type drawing struct {
	out   *tabwriter.Writer
	nodes []treeNode
	now   time.Time
}

// draw prints the first node behind lead, and what grew from it behind below.
func (d *drawing) draw(lead, below string) {
	for {
		n := d.nodes[0]
		d.nodes = d.nodes[1:]
		d.node(lead, below, n)
		branches := 0
		for _, next := range d.nodes {
			if next.Depth <= n.Depth {
				break
			}
			if next.Depth == n.Depth+1 {
				branches++
			}
		}
		if branches == 0 {
			return
		}
		if branches == 1 {
			lead = below
			continue
		}
		for ; branches > 1; branches-- {
			d.draw(below+"├─ ", below+"│  ")
		}
		lead, below = below+"└─ ", below+"   "
	}
}

func (d *drawing) node(lead, below string, n treeNode) {
	note := output.Age(d.now.Sub(n.Created))
	switch {
	case n.Error != nil:
		note = string(n.Error.Code)
	case n.ParentRemoved:
		note += ", its parent is gone"
	}
	d.line(lead+n.Name, output.Size(n.OwnBytes), note)
	for _, vm := range n.VMs {
		d.line(below+"* "+vm.Name, string(vm.State), "")
	}
}

func (d *drawing) line(name, what, note string) {
	// Nothing behind the last cell that has something in it.
	fmt.Fprintln(d.out, strings.TrimRight(output.Visible(name)+"\t"+what+"\t"+note, "\t"))
}
