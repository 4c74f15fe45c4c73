package agenttest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/agent/client"
)

// B10: every byte, on its own stream, and where a limit cuts the result says so.
func B10(t *testing.T, g *Guest) {
	t.Run("tail before exit", func(t *testing.T) { tail(t, g) })
	t.Run("two streams", func(t *testing.T) { twoStreams(t, g, g.scale(200<<20, 64<<20, 2<<20)) })
	t.Run("text and bytes", func(t *testing.T) { text(t, g) })
	t.Run("limits", func(t *testing.T) { limits(t, g) })
}

// tail has a program end right after its last write, which does not fit into a pipe.
func tail(t *testing.T, g *Guest) {
	const size = 65537
	g.sh(t, fmt.Sprintf("head -c %d /dev/urandom >tail", size))
	want := g.sum(t, "tail")
	for i := range g.scale(2000, 1000, 25) {
		sum := sha256.New()
		r, _ := g.exec(t, client.Command{Args: []string{"cat", "tail"}, Stdout: sum})
		if got := hex.EncodeToString(sum.Sum(nil)); r.ExitCode != 0 || r.StdoutBytes != size || got != want {
			t.Fatalf("round %d: got %+v with sum %s, want %d bytes with %s", i, r, got, size, want)
		}
	}
}

// sum is the SHA-256 of a file of Dir.
func (g *Guest) sum(t testing.TB, file string) string {
	t.Helper()
	sum, _, _ := strings.Cut(g.sh(t, "sha256sum "+file), " ")
	return sum
}

// twoStreams has different random bytes on each, as many of them at once as come.
func twoStreams(t *testing.T, g *Guest, size int) {
	make := fmt.Sprintf("head -c %d /dev/urandom | tee", size)
	stdout, stderr := sha256.New(), sha256.New()
	cmd := script("mkfifo one two; sha256sum <one >one.sum & sha256sum <two >two.sum & " + make + " two >&2 & " + make + " one; wait")
	cmd.Stdout, cmd.Stderr = stdout, stderr
	r, _ := g.exec(t, cmd)
	got := fmt.Sprintf("%x  -\n%x  -", stdout.Sum(nil), stderr.Sum(nil))
	if want := g.sh(t, "cat one.sum two.sum"); got != want {
		t.Errorf("received\n%s\nthe guest sent\n%s", got, want)
	}
	if r.StdoutBytes != int64(size) || r.StderrBytes != int64(size) || r.StdoutTruncated || r.StderrTruncated {
		t.Errorf("got %+v, want %d bytes on each stream", r, size)
	}
}

func text(t *testing.T, g *Guest) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for name, input := range map[string]string{"150 KiB of three-byte characters": strings.Repeat("€", 50<<10), "all bytes": string(all)} {
		if _, o := g.exec(t, client.Command{Args: []string{"cat"}, Stdin: strings.NewReader(input)}); o.stdout.String() != input {
			t.Errorf("%s: %d bytes came back, different from the %d sent", name, o.stdout.Len(), len(input))
		}
	}
	_, o := g.exec(t, script(`printf '\342'; sleep 0.1; printf '\202'; sleep 0.1; printf '\254'`))
	if o.stdout.String() != "€" {
		t.Errorf("a character in three writes came as %q", &o.stdout)
	}
	const lines = "out 1\nout 2\n"
	_, o = g.exec(t, script(`echo out 1; printf 'err ' >&2; echo out 2; echo 1 >&2`))
	if o.stdout.String() != lines || o.stderr.String() != "err 1\n" {
		t.Errorf("streams %q and %q", &o.stdout, &o.stderr)
	}
}

func limits(t *testing.T, g *Guest) {
	const limit = 100_000
	for _, size := range []int64{limit - 1, limit, limit + 1, 3 * limit} {
		for _, stream := range []string{"", " >&2"} {
			cmd := script(fmt.Sprintf("head -c %d /dev/zero%s", size, stream))
			cmd.StdoutLimit, cmd.StderrLimit = limit, limit
			r, o := g.exec(t, cmd)
			got, sent, dropped, cut := o.stdout.Len(), r.StdoutBytes, r.StdoutDropped, r.StdoutTruncated
			if stream != "" {
				got, sent, dropped, cut = o.stderr.Len(), r.StderrBytes, r.StderrDropped, r.StderrTruncated
			}
			want := min(size, limit)
			if r.ExitCode != 0 || int64(got) != want || sent != want || dropped != size-want || cut != (size > limit) {
				t.Errorf("%d bytes%s: got %d, %+v", size, stream, got, r)
			}
		}
	}
}
