package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
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
	h.must("create", slowly, "--snapshot", "attempt@4", "--name", "again")
	for _, vm := range []string{"left", "again"} {
		if got := h.must("log", vm, "--verify", "-o", "json"); strings.Count(got, `"proven": true`) != 2 { // attempt and trunk
			t.Errorf("%s: %s", vm, got)
		}
	}
	h.must("reset", "attempt", "--to", "attempt@2")
	if got := h.sh("attempt", "cat /root/a"); got != "one" {
		t.Errorf("after a reset: %q", got)
	}

	id := h.inspect("attempt").ID
	head := strings.Fields(h.must("log", "attempt", "--verify"))
	h.must("rm", "-f", "attempt", "left", "again")
	h.must("log", "attempt", "--verify", "--head", head[1])
	lines = h.log("attempt")
	if last := lines[len(lines)-1]; last.Event != "removed" {
		t.Errorf("the last line is %s", last.Event)
	}
	forge(t, filepath.Join(h.data, "rollouts"), `"exit_code":3`, `"exit_code":0`)
	h.refused("record_damaged", "log", "attempt", "--verify")
	h.must("log", "rm", "attempt")
	if got := h.must("snapshot", "ls", "-q", "--steps"); strings.Contains(got, id) || !strings.Contains(got, ".2") {
		t.Errorf("left, where only steps of the fork should be: %q", got)
	}
	if got := h.must("log", "ls", "--format", "{{.Name}}"); strings.Contains(got, "attempt") || !strings.Contains(got, "left") {
		t.Errorf("on record: %q", got)
	}
}

// What differs between two steps is what was done between them, in memory and on
// disk; and a replay tells what is random from what is not.
func TestDiffAndReplay(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("trunk")
	h.must("create", slowly, "--snapshot", "base", "--name", "attempt", "--record", "steps")
	h.must("exec", "attempt", "--", "sh", "-c", "echo one > /root/a; echo x > /root/gone; echo same > /root/same")
	h.must("exec", "attempt", "--", "sh", "-c", "echo two >> /root/a; chmod 600 /root/same; rm /root/gone; echo new > /run/new; sleep 100000 > /dev/null 2>&1 & echo started")
	h.must("exec", "attempt", "--", "cat", "/proc/sys/kernel/random/uuid")
	h.must("exec", "attempt", "--", "sh", "-c", "cat /proc/sys/kernel/random/uuid > /root/id; ln -s a /root/link; rm /root/same")

	var d struct {
		Files []struct {
			Path, Change, Diff string
			What               []string
		}
		Processes struct{ Started, Gone []struct{ Args []string } }
	}
	if err := json.Unmarshal([]byte(h.must("diff", "attempt@2", "attempt@4", "-p", "-o", "json")), &d); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range d.Files {
		got = append(got, strings.TrimSpace(f.Change+" "+f.Path+" "+strings.Join(f.What, " ")))
		if f.Path == "/root/a" && f.Diff != "@@ -1,1 +1,2 @@\n one\n+two\n" {
			t.Errorf("difference of /root/a: %q", f.Diff)
		}
	}
	for _, want := range []string{"changed /root/a contents", "changed /root/same mode", "removed /root/gone", "added /run/new"} {
		if !slices.Contains(got, want) {
			t.Errorf("%q is missing in %q", want, got)
		}
	}
	if len(got) > 8 {
		t.Errorf("much differs: %q", got)
	}
	if s := d.Processes.Started; len(s) != 1 || strings.Join(s[0].Args, " ") != "sleep 100000" || len(d.Processes.Gone) > 0 {
		t.Errorf("processes: %+v", d.Processes)
	}

	h.must("replay", slowly, "attempt", "--until", "5")
	r := h.forkvm("replay", slowly, "attempt", "-o", "json")
	var v struct {
		Lines []struct {
			Line        int
			Same        bool
			Differences []struct{ What string }
			Compared    bool `json:"files_compared"`
			Files       []struct{ Path, Change string }
		}
	}
	if err := json.Unmarshal([]byte(r.stdout), &v); err != nil || r.code != 1 || len(v.Lines) != 4 {
		t.Fatalf("%v: %v", err, r)
	}
	if last := v.Lines[2]; !v.Lines[0].Same || !v.Lines[1].Same || len(last.Differences) != 1 || last.Differences[0].What != "standard output" {
		t.Errorf("%+v", v.Lines)
	}
	if f := v.Lines[3].Files; len(f) != 1 || f[0].Path != "/root/id" || f[0].Change != "changed" || !v.Lines[0].Compared {
		t.Errorf("%+v", v.Lines)
	}
	if r := h.forkvm("replay", slowly, "attempt", "--from", "6", "--ignore", "/root/i*"); r.code != 0 {
		t.Error(r)
	}
	h.must("rm", "-f", "attempt", "trunk")
	h.must("log", "rm", "attempt")
}

// A rollout of 200 recorded steps: what a step costs beyond its command, how large
// the journal and the layers are, and that every step boots.
func TestRecordOf200Steps(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, t.TempDir())
	h.boot("trunk")
	const steps = 200
	script := func(i int) string {
		return fmt.Sprintf("echo %[1]d >> /root/steps; echo %[1]d >> /run/steps; head -c 20000 /dev/urandom > /root/data", i)
	}
	took := map[string]float64{}
	for _, recording := range []string{"none", "journal", "steps"} {
		vm := "vm-" + recording
		took["create "+recording] = h.medianOf(20, func(int) {
			h.must("create", slowly, "--snapshot", "base", "--name", vm, "--record", recording)
		}, func() { h.must("rm", "-f", vm) })
		h.must("create", slowly, "--snapshot", "base", "--name", vm, "--record", recording)
		count := 20
		if recording == "steps" {
			count = steps
		}
		took["exec "+recording] = h.medianOf(count, func(i int) { h.must("exec", vm, "--", "sh", "-c", script(i)) }, nil)
	}
	for _, what := range []string{"create", "exec"} {
		none := took[what+" none"]
		t.Logf("%s: %.2f cms; with a journal %.2f more, with steps %.2f more", what, none, took[what+" journal"]-none, took[what+" steps"]-none)
	}
	h.must("rm", "-f", "vm-none", "vm-journal")

	const vm = "vm-steps"
	id := h.inspect(vm).ID
	h.must("log", vm, "--verify")
	if lines := h.log(vm); len(lines) != 1+2*steps {
		t.Errorf("%d lines", len(lines))
	}
	info, err := os.Stat(filepath.Join(h.data, "rollouts", id, "journal.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var layers int64
	for line := range strings.Lines(h.must("snapshot", "ls", "--steps", "-o", "jsonl")) {
		var s struct {
			Name string
			Own  int64 `json:"own_bytes"`
		}
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(s.Name, id) {
			layers += s.Own
		}
	}
	t.Logf("journal: %d KiB, %d bytes a step; steps: %d KiB of their own each", info.Size()>>10, info.Size()/steps, layers/steps>>10)
	for i := range steps {
		step := fmt.Sprintf("%s@%d", vm, 2+2*i)
		got := h.must("run", "--rm", slowly, step, "--", "sh", "-c", "tail -n 1 /root/steps; tail -n 1 /run/steps")
		if want := fmt.Sprintf("%[1]d\n%[1]d\n", i); got != want {
			t.Errorf("%s shows %q, want %q", step, got, want)
		}
	}
	h.must("rm", "-f", vm, "trunk")
	h.must("log", "rm", vm)
	if got := h.must("snapshot", "ls", "-q", "--steps"); strings.TrimSpace(got) != "base" {
		t.Errorf("left: %q", got)
	}
}

// medianOf is how long something takes, in milliseconds; after happens behind each.
func (h *host) medianOf(count int, do func(i int), after func()) float64 {
	var all []float64
	for i := range count {
		begun := time.Now()
		do(i)
		all = append(all, float64(time.Since(begun))/float64(time.Millisecond))
		if after != nil {
			after()
		}
	}
	slices.Sort(all)
	return all[len(all)/2]
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
