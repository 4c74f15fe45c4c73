package cli

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"unicode/utf8"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
)

// Measures of a drawing, in pixels. Letters of a monospaced font of 13 pixels are 8
// wide.
const (
	svgRow    = 28
	svgIndent = 28
	svgMargin = 16
	svgLetter = 8
	svgDot    = 6
)

// drawSVG draws a tree: a line for each rollout, below and to the right of what it
// grew from, with a dot whose colour goes from red, reward 0, to green, reward 1;
// grey is without a reward.
func drawSVG(nodes []rolloutNode) []byte {
	var b bytes.Buffer
	width := 0
	for i := range nodes {
		width = max(width, svgX(nodes[i].Depth)+svgLetter*(3+utf8.RuneCountInString(svgText(&nodes[i]))))
	}
	width, height := width+svgMargin, 2*svgMargin+svgRow*len(nodes)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="monospace" font-size="13">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	drawEdges(&b, nodes)
	for i := range nodes {
		n := &nodes[i]
		x, y := svgX(n.Depth), svgY(i)
		fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="%d" fill="%s"><title>%s</title></circle>`+"\n", x, y, svgDot, svgColour(n), n.ID)
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", x+2*svgDot, y+5, html.EscapeString(svgText(n)))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

func svgX(depth int) int { return svgMargin + svgDot + svgIndent*depth }

func svgY(row int) int { return svgMargin + svgRow/2 + svgRow*row }

// drawEdges draws a line from each node's parent, which is the last one before it
// that is less deep.
func drawEdges(b *bytes.Buffer, nodes []rolloutNode) {
	var last []int // row of the last node of each depth
	for i, n := range nodes {
		last = append(last[:n.Depth], i)
		if n.Depth == 0 {
			continue
		}
		x, y := svgX(n.Depth-1), svgY(last[n.Depth-1])
		fmt.Fprintf(b, `<path d="M%d %dV%dH%d" fill="none" stroke="#888"/>`+"\n", x, y, svgY(i), svgX(n.Depth))
	}
}

// svgText is what stands beside a node; without control characters, which XML does
// not know.
func svgText(n *rolloutNode) string {
	text := n.label() + "  " + n.extent()
	if outcome := n.outcome(); outcome != "" {
		text += "  " + outcome
	}
	return output.Visible(text)
}

func svgColour(n *rolloutNode) string {
	if n.Verdict == nil || n.Verdict.Reward == nil || math.IsNaN(*n.Verdict.Reward) {
		return "#999"
	}
	return fmt.Sprintf("hsl(%.0f 70%% 42%%)", 120*min(max(*n.Verdict.Reward, 0), 1))
}
