package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// logLine is one line of a journal.
type logLine struct {
	Seq   int
	Hash  string
	Event string
	Data  struct {
		Args   []string
		Of     int
		Step   string
		Result *struct {
			ExitCode int `json:"exit_code"`
		}
		Stdout *struct{ Text string }
	}
}

func (h *host) log(rollout string) []logLine {
	h.t.Helper()
	var lines []logLine
	for text := range strings.Lines(h.must("log", rollout, "-o", "jsonl")) {
		var l logLine
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			h.t.Fatalf("%v: %s", err, text)
		}
		lines = append(lines, l)
	}
	return lines
}

// steps returns the lines of the operations behind which there is a step.
func steps(lines []logLine) (seqs []int) {
	for _, l := range lines {
		if l.Data.Step != "" {
			seqs = append(seqs, l.Data.Of)
		}
	}
	return seqs
}

// A rollout is recorded with its steps, looked at, gone on from, and read when its
// VM is gone.
func TestRecords(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("trunk")
	h.must("create", slowly, "--snapshot", "base", "--name", "attempt", "--record", "steps")
	h.must("exec", "attempt", "--", "sh", "-c", "echo one > /root/a; echo first > /run/a; echo done")
	if r := h.typing("two\n", "exec", "-i", "-e", "TOKEN=secret", "attempt", "--", "sh", "-c", "cat >> /root/a; exit 3"); r.code != 3 {
		t.Error(r)
	}
	file := filepath.Join(t.TempDir(), "b")
	if err := os.WriteFile(file, []byte("from the host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	h.must("cp", file, "attempt:/root/b")
	h.must("pause", "attempt")
	h.must("resume", "attempt")

	lines := h.log("attempt")
	var events []string
	for _, l := range lines {
		events = append(events, l.Event)
	}
	if got, want := strings.Join(events, " "), "created exec done exec done put done paused resumed"; got != want {
		t.Fatalf("events %q, want %q", got, want)
	}
	if lines[2].Data.Stdout.Text != "done\n" || lines[4].Data.Result.ExitCode != 3 {
		t.Errorf("%+v, %+v", lines[2].Data, lines[4].Data)
	}
	if raw := h.must("log", "attempt", "-o", "jsonl"); strings.Contains(raw, "secret") || !strings.Contains(raw, "TOKEN") {
		t.Errorf("of the environment names are kept, and no values: %s", raw)
	}
	if got := steps(lines); fmt.Sprint(got) != "[2 4 6]" {
		t.Fatalf("steps behind %v", got)
	}
	if got := h.must("snapshot", "ls", "-q"); strings.Fields(got)[0] != "base" || len(strings.Fields(got)) != 1 {
		t.Errorf("snapshots: %q", got)
	}

	// Every step is the exact state, in memory and on disk, and goes away again.
	for step, want := range map[int]string{2: "first one", 4: "first one two", 6: "first one two from the host"} {
		got := h.must("run", "--rm", fmt.Sprintf("attempt@%d", step), "--", "sh", "-c", "cat /run/a /root/*")
		if strings.Join(strings.Fields(got), " ") != want {
			t.Errorf("step %d shows %q, want %q", step, got, want)
		}
	}
	h.must("fork", "attempt", "--name", "left")
	h.must("exec", "left", "--", "true")
	h.must("reset", "attempt", "--to", "attempt@2")
	if got := h.sh("attempt", "cat /root/a"); got != "one" {
		t.Errorf("after a reset: %q", got)
	}

	head := strings.Fields(h.must("log", "attempt", "--verify"))
	h.must("rm", "-f", "attempt", "left")
	h.must("log", "attempt", "--verify", "--head", head[1])
	lines = h.log("attempt")
	if last := lines[len(lines)-1]; last.Event != "removed" {
		t.Errorf("the last line is %s", last.Event)
	}
	forge(t, filepath.Join(h.data, "rollouts"), `"exit_code":3`, `"exit_code":0`)
	h.refused("record_damaged", "log", "attempt", "--verify")
	h.must("log", "rm", "attempt")
	if got := h.must("snapshot", "ls", "-q", "--steps"); strings.Contains(got, ".2") {
		t.Errorf("left: %q", got)
	}
	if got := h.must("log", "ls", "--format", "{{.Name}}"); strings.Contains(got, "attempt") || !strings.Contains(got, "left") {
		t.Errorf("on record: %q", got)
	}
}

// forge changes a text in the one journal that has it.
func forge(t *testing.T, dir, from, to string) {
	t.Helper()
	journals, err := filepath.Glob(filepath.Join(dir, "*", "journal.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range journals {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(b), from) {
			continue
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(b), from, to, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Fatalf("no journal has %s", from)
}
