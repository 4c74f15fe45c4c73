package cli

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestUnified(t *testing.T) {
	for _, c := range []struct{ name, a, b, want string }{
		{"the same", "a\nb\n", "a\nb\n", ""},
		{"a line changed", "a\nb\nc\n", "a\nx\nc\n", "@@ -1,3 +1,3 @@\n a\n-b\n+x\n c\n"},
		{"from nothing", "", "a\n", "@@ -0,0 +1,1 @@\n+a\n"},
		{"to nothing", "a\n", "", "@@ -1,1 +0,0 @@\n-a\n"},
		{"no newline", "a", "a\n", "@@ -1,1 +1,1 @@\n-a\n\\ No newline at end of file\n+a\n"},
		{"far apart", "1\n2\n3\n4\n5\n6\n7\n8\n9\n", "x\n2\n3\n4\n5\n6\n7\n8\ny\n",
			"@@ -1,4 +1,4 @@\n-1\n+x\n 2\n 3\n 4\n@@ -6,4 +6,4 @@\n 6\n 7\n 8\n-9\n+y\n"},
	} {
		if got := unified([]byte(c.a), []byte(c.b)); got != c.want {
			t.Errorf("%s: got\n%swant\n%s", c.name, got, c.want)
		}
	}
}

// What patch makes of the one text and the difference is the other.
func TestPatchTakesIt(t *testing.T) {
	if _, err := exec.LookPath("patch"); err != nil {
		t.Skip("no patch(1) here: apt-get install patch")
	}
	random := rand.New(rand.NewPCG(1, 2))
	text := func() string {
		var b strings.Builder
		for range random.IntN(40) {
			b.WriteString(string(rune('a'+random.IntN(4))) + "\n")
		}
		return b.String()
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	for range 50 {
		a, b := text(), text()
		d := unified([]byte(a), []byte(b))
		if d == "" {
			continue
		}
		if err := os.WriteFile(path, []byte(a), 0o644); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("patch", "-s", path)
		cmd.Stdin = strings.NewReader("--- a\n+++ b\n" + d)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("patch: %v: %s\nfrom %q to %q:\n%s", err, out, a, b, d)
		}
		got, err := os.ReadFile(path)
		if err != nil && b != "" || string(got) != b {
			t.Fatalf("patched %q, want %q:\n%s", got, b, d)
		}
	}
}

// Lines that are too many to compare are all of one side and then all of the other.
func TestMuchDiffers(t *testing.T) {
	a, b := strings.Repeat("a\n", 3000), strings.Repeat("b\n", 3000)
	d := unified([]byte(a), []byte(b))
	if strings.Count(d, "\n-") != 3000 || strings.Count(d, "\n+") != 3000 {
		t.Errorf("%d lines", strings.Count(d, "\n"))
	}
}
