package cli

import (
	"encoding/xml"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDrawTree(t *testing.T) {
	s := newSession(t)
	path := filepath.Join(t.TempDir(), "tree.svg")
	if _, stderr, code := s.run("tree", "alpha", "--svg", path); code != 0 {
		t.Fatal(stderr)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d := xml.NewDecoder(strings.NewReader(string(b)))
	circles := 0
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "circle" {
			circles++
		}
	}
	if circles != 3 || !strings.Contains(string(b), "hsl(60 ") || !strings.Contains(string(b), "hsl(120 ") || !strings.Contains(string(b), "scored 0.5") {
		t.Errorf("%d rollouts: %s", circles, b)
	}
}

// Names and outcomes may be anybody's.
func TestDrawingIsXML(t *testing.T) {
	n := rolloutNode{rolloutView: rolloutView{ID: "0123456789ab", Name: "<a>&\x1b[31m\x00\xff", Ended: "\"'"}}
	if err := xml.Unmarshal(drawSVG([]rolloutNode{n}), new(struct{ XMLName xml.Name })); err != nil {
		t.Error(err)
	}
}

// A rollout of which the parent's journal says nothing is found all the same, and
// journals that name each other do not hang it.
func TestRolloutsInACircle(t *testing.T) {
	g := &growth{byID: map[string]*rolloutNode{}}
	for _, id := range []string{"a", "b"} {
		n := &rolloutNode{rolloutView: rolloutView{ID: id}}
		g.nodes, g.byID[id] = append(g.nodes, n), n
	}
	g.nodes[0].children, g.nodes[1].children = g.nodes[1:], g.nodes[:1]
	if all := g.below("a"); len(all) != 2 || all[1].Depth != 1 {
		t.Errorf("got %+v", all)
	}
}
