package cli

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
)

// courseView is a rollout and those that grew from it.
type courseView struct {
	Schema string `json:"schema"`
	// Rollouts are in the order in which the tree is printed: each before those that
	// grew from it.
	Rollouts []rolloutNode `json:"rollouts"`
}

// rolloutNode is one rollout at its place.
type rolloutNode struct {
	rolloutView
	Depth int `json:"depth"`

	children []*rolloutNode
}

// growth is all rollouts, linked with what they grew from.
type growth struct {
	nodes []*rolloutNode
	byID  map[string]*rolloutNode
}

// madeBy says which line of which rollout made a snapshot.
type madeBy struct {
	rollout string
	line    uint64
}

func newGrowth(rollouts []Rollout) *growth {
	g := &growth{byID: map[string]*rolloutNode{}}
	makers, origins := map[string]madeBy{}, map[string]string{}
	for _, r := range rollouts {
		n := &rolloutNode{rolloutView: rolloutView{Schema: rolloutSchema, ID: r.ID()}}
		g.nodes, g.byID[n.ID] = append(g.nodes, n), n
		h, err := readHistory(r)
		if err == nil {
			err = h.damage
			n.sum(h)
			origins[n.ID] = h.created.SnapshotID
			noteMakers(makers, h)
		}
		if err != nil {
			n.Error = explain(err)
		}
	}
	slices.SortStableFunc(g.nodes, func(a, b *rolloutNode) int { return a.Created.Compare(b.Created) })
	for _, n := range g.nodes {
		if maker, known := makers[origins[n.ID]]; n.Parent == "" && known && maker.rollout != n.ID {
			n.Parent, n.ParentLine = maker.rollout, maker.line
		}
		if parent := g.byID[n.Parent]; parent != nil {
			parent.children = append(parent.children, n)
		}
	}
	for _, n := range g.nodes {
		slices.SortStableFunc(n.children, func(a, b *rolloutNode) int { return cmp.Compare(a.ParentLine, b.ParentLine) })
	}
	return g
}

// noteMakers notes the snapshots and steps that a rollout has made.
func noteMakers(makers map[string]madeBy, h *history) {
	for i := range h.lines {
		e := &h.lines[i]
		switch {
		case e.Event == journal.EventSnapshot:
			var s journal.Snapshot
			if e.Decode(&s) == nil && s.ID != "" {
				makers[s.ID] = madeBy{h.id, e.Seq}
			}
		case e.op != nil && e.done != nil && e.done.StepID != "":
			makers[e.done.StepID] = madeBy{h.id, e.Seq}
		}
	}
}

// below is a rollout and all that grew from it, each before its children. What
// journals say may go round in a circle; no rollout is visited twice.
func (g *growth) below(id string) []rolloutNode {
	var all []rolloutNode
	seen := map[*rolloutNode]bool{}
	var down func(n *rolloutNode, depth int)
	down = func(n *rolloutNode, depth int) {
		if n == nil || seen[n] {
			return
		}
		seen[n], n.Depth = true, depth
		all = append(all, *n)
		for _, child := range n.children {
			down(child, depth+1)
		}
	}
	down(g.byID[id], 0)
	return all
}

// showRolloutTree prints what grew from a rollout, or draws it.
func (a *app) showRolloutTree(_ context.Context, n Node, r Rollout, svg string) error {
	all, err := n.Rollouts()
	if err != nil {
		return err
	}
	v := courseView{Schema: "forkvm/rollout-tree/v1", Rollouts: newGrowth(all).below(r.ID())}
	if svg != "" {
		return writeSVG(svg, v.Rollouts)
	}
	switch {
	case a.format == output.JSON:
		return output.WriteJSON(a.Stdout, v)
	case a.format == output.Table:
		return a.drawRollouts(v.Rollouts)
	}
	return output.List[rolloutNode]{Name: func(n rolloutNode) string { return n.ID }, Items: v.Rollouts}.Write(a.Stdout, a.format)
}

func (a *app) drawRollouts(nodes []rolloutNode) error {
	t := tabwriter.NewWriter(a.Stdout, 0, 0, 3, ' ', 0)
	leads := indent(nodes)
	for i, n := range nodes {
		fmt.Fprintln(t, strings.TrimRight(leads[i]+output.Visible(n.label())+"\t"+n.extent()+"\t"+output.Visible(n.outcome()), "\t"))
	}
	return t.Flush()
}

// indent is what stands before each node of a tree.
func indent(nodes []rolloutNode) []string {
	leads := make([]string, len(nodes))
	for i, n := range nodes {
		if n.Depth == 0 {
			continue
		}
		var b strings.Builder
		for depth := 1; depth < n.Depth; depth++ {
			if hasSibling(nodes, i, depth) {
				b.WriteString("│  ")
			} else {
				b.WriteString("   ")
			}
		}
		if hasSibling(nodes, i, n.Depth) {
			b.WriteString("├─ ")
		} else {
			b.WriteString("└─ ")
		}
		leads[i] = b.String()
	}
	return leads
}

// hasSibling says whether another node of a depth comes before the tree goes back
// beyond it.
func hasSibling(nodes []rolloutNode, from, depth int) bool {
	for _, n := range nodes[from+1:] {
		if n.Depth <= depth {
			return n.Depth == depth
		}
	}
	return false
}

// label is what the rollout is called, and where in its parent it began.
func (n *rolloutNode) label() string {
	name := n.Name
	if name == "" {
		name = n.ID
	}
	if n.Depth > 0 && n.ParentLine > 0 {
		name += fmt.Sprintf(" @%d", n.ParentLine)
	}
	return name
}

func (n *rolloutNode) extent() string {
	text := counted(n.Operations, "operation")
	if n.Steps > 0 {
		text += ", " + counted(n.Steps, "step")
	}
	return text
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// outcome is the last verdict or, without one, why the rollout has ended.
func (n *rolloutNode) outcome() string {
	switch {
	case n.Error != nil:
		return string(n.Error.Code)
	case n.Verdict != nil:
		return describeVerdict(*n.Verdict)
	}
	return n.Ended
}

// writeSVG draws a tree into a file, complete or not at all.
func writeSVG(path string, nodes []rolloutNode) error {
	err := os.WriteFile(path+".new", drawSVG(nodes), 0o644)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		os.Remove(path + ".new")
		return failure.As(failure.InvalidArgument, err)
	}
	return nil
}
