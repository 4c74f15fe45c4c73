package cli

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/doctor"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/settings"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// session runs command lines on one fake node.
type session struct {
	t      *testing.T
	node   *fakeNode
	env    Environment
	stdin  string
	getenv map[string]string
}

func newSession(t *testing.T) *session {
	s := &session{t: t, node: newFakeNode(t), getenv: map[string]string{}}
	s.env = Environment{
		User:       settings.User{UID: 0, Getenv: func(name string) string { return s.getenv[name] }},
		Now:        func() time.Time { return epoch.Add(2 * time.Hour) },
		Version:    "1.2.3",
		GuestAgent: "/usr/libexec/forkvm-agent",
		OpenNode:   func(settings.Settings) (Node, error) { return s.node, nil },
		Examine: func(context.Context, doctor.Config) doctor.Report {
			return doctor.Report{Schema: doctor.Schema, Usable: false, Checks: []doctor.Check{
				{Name: "kvm", Status: doctor.Failed, Detail: "open /dev/kvm: no such file or directory", Fix: "load the module"},
				{Name: "memory", Status: doctor.OK, Detail: "8000 MiB available of 16000 MiB"},
			}}
		},
	}
	return s
}

// run returns what a command line prints and its exit code.
func (s *session) run(args ...string) (stdout, stderr string, code int) {
	s.t.Helper()
	return s.runContext(s.t.Context(), args...)
}

func (s *session) runContext(ctx context.Context, args ...string) (string, string, int) {
	var stdout, stderr bytes.Buffer
	e := s.env
	e.Stdout, e.Stderr = &stdout, &stderr
	if e.Stdin == nil {
		e.Stdin = strings.NewReader(s.stdin)
	}
	code := Main(ctx, e, append([]string{"--config", os.DevNull}, args...))
	return stdout.String(), stderr.String(), code
}

// TestTranscripts replays the command lines in testdata and compares everything
// that a user sees: what is printed where, and the exit code.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := replay(newSession(t), string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("transcript differs (-update rewrites it); got:\n%s", got)
			}
		})
	}
}

// replay runs the lines that begin with "$ forkvm"; words are separated by
// spaces, and single quotes hold words together. Lines with # stay.
func replay(s *session, script string) string {
	var b strings.Builder
	for line := range strings.Lines(script) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "#") {
			fmt.Fprintln(&b, line)
			continue
		}
		words, found := strings.CutPrefix(line, "$ forkvm")
		if !found {
			continue
		}
		stdout, stderr, code := s.run(split(words)...)
		fmt.Fprintln(&b, line)
		stable := strings.NewReplacer(s.node.dir, "DIR", runtime.Version(), "GO")
		b.WriteString(stable.Replace(stdout))
		for line := range strings.Lines(stable.Replace(stderr)) {
			b.WriteString("! " + line)
		}
		if code != 0 {
			fmt.Fprintf(&b, "= exit code %d\n", code)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func split(line string) []string {
	var words []string
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			words = append(words, part)
			continue
		}
		words = append(words, strings.Fields(part)...)
	}
	return words
}
