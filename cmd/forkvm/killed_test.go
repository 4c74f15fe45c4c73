package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/store"
)

// killed calls the program and kills it as soon as something has happened.
func (h *host) killed(what string, happened func() bool, args ...string) {
	h.t.Helper()
	cmd := h.command(h.t.Context(), args...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	defer func() { h.t.Logf("forkvm %s, killed when %s: %s", args[0], what, &said) }()
	defer cmd.Wait()
	defer cmd.Process.Kill()
	h.eventually(what, happened)
}

// others are the records of VMs besides one, those that are being made too.
func (h *host) others(than view) (records []node.Record) {
	h.t.Helper()
	paths, err := filepath.Glob(filepath.Join(h.run, "vms", "*", "vm.json"))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, path := range paths {
		var r node.Record
		if data, err := os.ReadFile(path); err != nil || json.Unmarshal(data, &r) != nil {
			continue // removed meanwhile
		}
		if r.ID != than.ID {
			records = append(records, r)
		}
	}
	return records
}

// ready is how many of them have become VMs.
func ready(records []node.Record) (n int) {
	for _, r := range records {
		if r.ReadyMS > 0 {
			n++
		}
	}
	return n
}

// whileJudging are moments at which whoever judges is killed.
var whileJudging = []struct {
	name string
	// reached says whether it is one, from the last line of the journal and the records
	// of the machines in which is judged.
	reached func(h *host, event string, machines []node.Record) bool
}{
	{"its machines are being made", func(_ *host, _ string, machines []node.Record) bool { return len(machines) > 0 }},
	{"it has begun", func(_ *host, event string, _ []node.Record) bool { return event == journal.EventJudging }},
	{"both machines are there", func(_ *host, _ string, machines []node.Record) bool { return ready(machines) == 2 }},
	{"the verifier runs", func(h *host, _ string, machines []node.Record) bool {
		return ready(machines) == 2 && h.forkvm("exec", machines[0].Name, "--", "test", "-e", "/logs/verifier/begun").code == 0
	}},
	{"the verdict is there", func(_ *host, event string, _ []node.Record) bool { return event == journal.EventVerdict }},
}

// A judge that is killed, whenever, leaves no machine and no verdict that is none. The
// rollout goes on, and can be judged again.
func TestJudgeIsKilled(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, "")
	v := h.start("rollout")
	h.sh("rollout", "mkdir -p /srv/work; echo 42 > /srv/work/answer; sleep 100000 > /dev/null 2>&1 &")
	tests := t.TempDir()
	program := "#!/bin/sh\necho > /logs/verifier/begun\nsleep 2\n[ \"$(cat /srv/work/answer)\" != 42 ] || echo 1 > /logs/verifier/reward.txt\n"
	if err := os.WriteFile(filepath.Join(tests, "test.sh"), []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	reward := []string{"reward", "rollout", "--verifier", tests, "--artifact", "/srv/work"}
	for i, moment := range whileJudging {
		t.Run(moment.name, func(t *testing.T) {
			h := &host{t, h.data, h.run}
			before := h.events(v)
			var machines []node.Record
			h.killed(moment.name, func() bool {
				machines = h.others(v)
				events := h.events(v)
				return len(events) > len(before) && moment.reached(h, events[len(events)-1], machines)
			}, reward...)
			for _, m := range machines {
				h.eventually("end of a machine's process", func() bool { return m.PID == 0 || gone(m.PID) })
			}
			// One whose start was under way is noticed when that is over.
			h.eventually("only the rollout is left", func() bool {
				return len(strings.Fields(h.must("ls", "-aq"))) == 1 && len(h.others(v)) == 0
			})
			if now := h.inspect("rollout"); now.PID != v.PID || now.State != "running" || now.Generation != v.Generation {
				t.Errorf("the rollout was %+v, is %+v", v, now)
			}
			if got := h.sh("rollout", "cat /srv/work/answer; pidof sleep | wc -w; ls -d /tests 2>/dev/null || true"); got != "42\n1" {
				t.Errorf("the rollout has %q", got)
			}
			h.must("log", "rollout", "--verify")
			after := h.events(v)[len(before):]
			if after[0] != journal.EventJudging || slices.Contains(after, journal.EventVerdict) != (moment.name == "the verdict is there") {
				t.Errorf("on record is %q", after)
			}
			if i == 0 && !strings.Contains(h.must("log", "rollout"), "no verdict on record") {
				t.Error("the log does not say that it was cut off")
			}
		})
	}
	// The first finds what the killed ones have left where the pages that judging takes are
	// noted, and notes them; the other finds them ready.
	for range 2 {
		if got := h.must(append(reward, "-o", "json")...); !strings.Contains(got, `"outcome": "scored"`) || !strings.Contains(got, `"reward": 1,`) {
			t.Errorf("judged again: %s", got)
		}
	}
	if st, err := os.Stat(filepath.Join(h.data, "snapshots", h.base(), store.JudgingSetFile)); err != nil || st.Size() == 0 {
		t.Errorf("nothing is recorded of what judging takes: %v", err)
	}
}

// events are those of a VM's journal, as they are now.
func (h *host) events(v view) (events []string) {
	h.t.Helper()
	text, err := os.ReadFile(filepath.Join(h.data, "rollouts", v.ID, "journal.jsonl"))
	if err != nil {
		h.t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var l logLine
		if json.Unmarshal(line, &l) == nil { // not just being written
			events = append(events, l.Event)
		}
	}
	return events
}

// Whoever has a command run or a snapshot taken and is killed takes the command along
// and leaves no half of a snapshot. The VM goes on.
func TestCallerIsKilled(t *testing.T) {
	testkit.Long(t)
	h := newHost(t, t.TempDir())
	h.boot("trunk")
	v := h.inspect("trunk")
	running := func() bool { return h.sh("trunk", "pidof sleep | wc -w") == "1" }
	h.killed("its command runs", running, "exec", "trunk", "--", "sleep", "100000")
	h.eventually("end of the command", func() bool { return !running() })
	if got := h.must("log", "trunk"); !strings.Contains(got, "no end on record") {
		t.Errorf("on record is %s", got)
	}
	h.killed("files are being written", func() bool {
		entries, _ := filepath.Glob(filepath.Join(h.data, "tmp", "*", "*"))
		return len(entries) > 0
	}, "snapshot", "trunk", "half")
	h.killed("it has asked for it", func() bool { return true }, "snapshot", "trunk", "half")
	if h.forkvm("snapshot", "check").code != 0 {
		t.Error("a snapshot is damaged")
	}
	h.forkvm("snapshot", "rm", "half") // it may have come to its end
	h.must("snapshot", "trunk", "half")
	h.must("run", "--rm", "half", "--", "true")
	if left, _ := filepath.Glob(filepath.Join(h.data, "tmp", "*")); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if now := h.inspect("trunk"); now.PID != v.PID || now.State != "running" {
		t.Errorf("the VM was %+v, is %+v", v, now)
	}
	h.sh("trunk", "true")
	h.must("log", "trunk", "--verify")
	h.must("rm", "-f", "trunk")
}
