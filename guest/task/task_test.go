package task

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// write makes a task directory.
func write(t *testing.T, config string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "sums")
	for name, content := range map[string]string{
		"task.toml": config, "instruction.md": "Add the numbers.\n", "tests/test.sh": "#!/bin/sh\n", "steps/one/tests/test.sh": "#!/bin/sh\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const complete = `
schema_version = "1.3"
source = "a/b"
artifacts = ["/app/out/", { source = "/app/log", destination = "/var/log/app", exclude = ["*.tmp"] }]
multi_step_reward_strategy = "final"

[task]
name = "example/sums"
description = "adds"
authors = [{ name = "A" }]

[metadata]
difficulty = "easy"
anything = { goes = [1, "here"] }

[agent]
timeout_sec = 900.5
user = 1000
network_mode = "allowlist"
allowed_hosts = ["pypi.org", "*.pythonhosted.org"]

[verifier]
timeout_sec = 120
env = { KEY = "${TOKEN:-none}" }
user = "dev"
environment_mode = "shared"
network_mode = "no-network"

[environment]
docker_image = "debian:12"
cpus = 2
memory_mb = 2048
storage_mb = 10240
workdir = "/app"
env = { LANG = "C" }

[environment.healthcheck]
command = "true"
interval_sec = 1

[solution]
env = { A = "b" }

[forkvm.judging]
where = "transplant"
work_tree = "/srv/project"
exclude = ["*.log"]
score = "junit"
junit = "/logs/verifier/report.xml"
toolchain = "free"
protect = ["/opt/checker"]
artifact_bytes = "2G"
artifact_entries = 50
`

func TestOpen(t *testing.T) {
	task, err := Open(write(t, complete))
	if err != nil {
		t.Fatal(err)
	}
	want := Task{
		Dir: task.Dir, Name: "example/sums", SchemaVersion: "1.3", Instruction: "Add the numbers.\n", StepRewards: "final",
		Agent: Agent{Timeout: 900500 * time.Millisecond, User: "1000", Network: Network{"allowlist", []string{"pypi.org", "*.pythonhosted.org"}}},
		Verifier: Verifier{
			Timeout: 2 * time.Minute, Env: map[string]string{"KEY": "${TOKEN:-none}"}, User: "dev", Network: Network{Mode: "no-network"},
		},
		Environment: Environment{
			BuildTimeout: 10 * time.Minute, Image: "debian:12", OS: "linux", CPUs: 2, MemoryMB: 2048, StorageMB: 10240, WorkDir: "/app",
			Env:         map[string]string{"LANG": "C"},
			Healthcheck: &Healthcheck{Command: "true", Interval: time.Second, Timeout: 30 * time.Second, Retries: 3},
		},
		SolutionEnv: map[string]string{"A": "b"},
		Judging: Judging{
			Where: Transplant, WorkTree: "/srv/project", Exclude: []string{"*.log"},
			Artifacts: []Artifact{{Source: "/app/out"}, {"/app/log", "/var/log/app", []string{"*.tmp"}}},
			Score:     ScoreJUnit, JUnit: "/logs/verifier/report.xml", FreeToolchain: true, Protect: []string{"/opt/checker"},
			ArtifactBytes: 2 << 30, ArtifactEntries: 50,
		},
	}
	if !reflect.DeepEqual(*task, want) {
		t.Errorf("got  %+v\nwant %+v", *task, want)
	}
}

func TestDefaults(t *testing.T) {
	task, err := Open(write(t, "[environment]\nworkdir = \"/app\""))
	if err != nil {
		t.Fatal(err)
	}
	j := task.Judging
	if task.Name != "sums" || task.Verifier.Timeout != 10*time.Minute || j.Where != Both || j.Score != ScoreReward ||
		!reflect.DeepEqual(j.Artifacts, []Artifact{{Source: "/app"}}) || len(task.Warnings) != 0 {
		t.Errorf("got %+v", task)
	}
}

// Older versions have other names for some things.
func TestOlderNames(t *testing.T) {
	task, err := Open(write(t, "version = \"1.0\"\n[environment]\nmemory = \"2G\"\nstorage = \"512Mi\"\nallow_internet = false\nworkdir = \"/app\""))
	if err != nil {
		t.Fatal(err)
	}
	e := task.Environment
	if task.SchemaVersion != "1.0" || e.MemoryMB != 2048 || e.StorageMB != 512 || e.Network.Mode != "no-network" {
		t.Errorf("got %+v", task)
	}
}

func TestPatternsThatAreApart(t *testing.T) {
	if _, err := Open(write(t, "artifacts = [\"/srv/*.txt\", \"/srv/a.log\", \"/t[a-d]st\"]")); err != nil {
		t.Error(err)
	}
}

func TestSeparateEnvironmentIsATransplant(t *testing.T) {
	task, err := Open(write(t, "artifacts = [\"/out\"]\n[verifier]\nenvironment_mode = \"separate\""))
	if err != nil || task.Judging.Where != Transplant {
		t.Errorf("got %+v, %v", task, err)
	}
}

func TestSteps(t *testing.T) {
	task, err := Open(write(t, "[environment]\nworkdir = \"/app\"\n[[steps]]\nname = \"one\"\nmin_reward = 0.5"))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := task.Tests("one")
	if err != nil || dir != filepath.Join(task.Dir, "steps/one/tests") || *task.Steps[0].MinReward != 0.5 {
		t.Errorf("got %s, %v, %+v", dir, err, task.Steps)
	}
	for _, step := range []string{"", "two", ".."} {
		if _, err := task.Tests(step); err == nil {
			t.Errorf("step %q has tests", step)
		}
	}
}

func TestMistakes(t *testing.T) {
	cases := []struct{ name, config, field, says string }{
		{"no toml", "a = ", "a", "line 1"},
		{"wrong kind", "[agent]\ntimeout_sec = \"long\"", "", "timeout_sec"},
		{"version", "schema_version = \"2.0\"", "schema_version", "1.3"},
		{"negative time", "[agent]\ntimeout_sec = -1", "agent.timeout_sec", "-1"},
		{"no number", "[verifier]\ntimeout_sec = nan", "verifier.timeout_sec", "NaN"},
		{"no time", "[verifier]\ntimeout_sec = 0", "verifier.timeout_sec", "0"},
		{"user", "[agent]\nuser = true", "agent.user", "name nor a number"},
		{"mode", "[environment]\nnetwork_mode = \"open\"", "environment.network_mode", "allowlist"},
		{"hosts without a list", "[environment]\nnetwork_mode = \"public\"\nallowed_hosts = [\"a\"]", "environment.allowed_hosts", "public"},
		{"host", "[agent]\nnetwork_mode = \"allowlist\"\nallowed_hosts = [\"a*b\"]", "agent.allowed_hosts", "a*b"},
		{"two networks", "[environment]\nnetwork_mode = \"public\"\nallow_internet = false", "environment.allow_internet", "exclude"},
		{"two sizes", "[environment]\nmemory_mb = 1\nmemory = \"2G\"", "environment.memory", "2G"},
		{"size", "[environment]\nmemory = \"much\"", "environment.memory", "much"},
		{"os", "[environment]\nos = \"windows\"", "environment.os", "windows"},
		{"gpu", "[environment]\ngpus = 1", "environment.gpus", "GPU"},
		{"relative", "[environment]\nworkdir = \"app\"", "environment.workdir", "app"},
		{"healthcheck", "[environment.healthcheck]\nretries = 1", "environment.healthcheck.command", "missing"},
		{"variable", "[verifier]\nenv = { A = \"${B\" }", "verifier.env.A", "}"},
		{"step", "[[steps]]\nname = \"../x\"", "steps[0].name", "../x"},
		{"step twice", "[[steps]]\nname = \"one\"\n[[steps]]\nname = \"one\"", "steps[1].name", "twice"},
		{"reward", "[[steps]]\nname = \"one\"\nmin_reward = 2.0", "steps[0].min_reward", "2"},
		{"where", "[forkvm.judging]\nwhere = \"here\"", "forkvm.judging.where", "transplant"},
		{"own name", "[forkvm.judging]\nwher = \"fork\"", "forkvm.judging.wher", "where"},
		{"own section", "[forkvm.judgin]\nwhere = \"fork\"", "forkvm.judgin", "not known"},
		{"report", "[forkvm.judging]\njunit = \"/x\"", "forkvm.judging.junit", "reward"},
		{"exclude", "[forkvm.judging]\nexclude = [\"x\"]", "forkvm.judging.exclude", "work_tree"},
		{"pattern", "[forkvm.judging]\nwork_tree = \"/a\"\nexclude = [\"[\"]", "forkvm.judging.exclude", "["},
		{"everything", "artifacts = [\"/\"]", "artifacts", "whole"},
		{"detour", "artifacts = [\"/a/../b\"]", "artifacts[0].source", "shortest"},
		{"artifact", "artifacts = [1]", "artifacts[0]", "path"},
		{"artifact's name", "artifacts = [{ source = \"/a\", dest = \"/b\" }]", "artifacts[0].dest", "destination"},
		{"moved pattern", "artifacts = [{ source = \"/a/*\", destination = \"/b\" }]", "artifacts[0].destination", "pattern"},
		{"in the tests", "artifacts = [\"/tests/x\"]", "artifacts", "verifier"},
		{"over the tests", "artifacts = [\"/logs\"]", "artifacts", "verifier"},
		{"pattern of the tests", "artifacts = [\"/*/x\"]", "artifacts", "verifier"},
		{"pattern of another", "artifacts = [\"/srv/*.txt\", \"/srv/a.txt/b\"]", "artifacts", "apart"},
		{"one in the other", "artifacts = [\"/a\", \"/a/b\"]", "artifacts", "apart"},
		{"the work tree in one", "artifacts = [\"/a\"]\n[forkvm.judging]\nwork_tree = \"/a/b\"", "forkvm.judging.work_tree", "apart"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := Open(write(t, c.config))
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("got %v", err)
			}
			if e.File != "task.toml" || e.Field != c.field && c.field != "" || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %s %s: %v", e.File, e.Field, err)
			}
		})
	}
}

func TestUnknownNamesElsewhereAreWarnings(t *testing.T) {
	task, err := Open(write(t, "[environment]\nworkdir = \"/app\"\nfuture = 1\n[verifier]\nretries = 3"))
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(task.Warnings, "\n")
	if len(task.Warnings) != 2 || !strings.Contains(all, "environment.future") || !strings.Contains(all, "verifier.retries") {
		t.Errorf("got %q", task.Warnings)
	}
}

func TestTransplantOfNothingIsAWarning(t *testing.T) {
	task, err := Open(write(t, ""))
	if err != nil || len(task.Warnings) != 1 || !strings.Contains(task.Warnings[0], "transplant") {
		t.Errorf("got %+v, %v", task, err)
	}
}

func TestMissingFiles(t *testing.T) {
	dir := write(t, "")
	os.Remove(filepath.Join(dir, "tests/test.sh"))
	var e *Error
	if _, err := Open(dir); !errors.As(err, &e) || e.File != "tests/test.sh" {
		t.Errorf("no tests: %v", err)
	}
	os.Remove(filepath.Join(dir, "task.toml"))
	if _, err := Open(dir); !errors.As(err, &e) || e.File != "task.toml" {
		t.Errorf("no task.toml: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "none")); err == nil {
		t.Error("no directory is a task")
	}
}

func TestExpand(t *testing.T) {
	lookup := func(name string) (string, bool) {
		v, ok := map[string]string{"A": "x", "EMPTY": ""}[name]
		return v, ok
	}
	for value, want := range map[string]string{
		"plain": "plain", "$A": "$A", "${A}": "x", "<${A}${A}>": "<xx>", "${B:-y}": "y", "${EMPTY:-y}": "y", "${EMPTY}": "", "${B:-}": "",
	} {
		if got, err := Expand(value, lookup); err != nil || got != want {
			t.Errorf("%q: got %q, %v, want %q", value, got, err, want)
		}
	}
	for _, value := range []string{"${B}", "${", "${A", "${}", "${a b}", "${1}"} {
		if got, err := Expand(value, lookup); err == nil {
			t.Errorf("%q is %q", value, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(complete))
	f.Add([]byte("version = \"1.0\"\n[environment]\nmemory = \"2G\""))
	f.Add([]byte("artifacts = [[1], {}, \"/a*\"]\n[[steps]]\nname = \"a\""))
	f.Fuzz(func(t *testing.T, text []byte) {
		task, err := parse(text)
		if (task == nil) == (err == nil) {
			t.Fatalf("got %v, %v", task, err)
		}
		if err != nil {
			return
		}
		for i, a := range task.Judging.Artifacts {
			for _, b := range task.Judging.Artifacts[:i] {
				if a.Source == b.Source && a.Destination == b.Destination {
					t.Errorf("%v and %v meet", a, b)
				}
			}
		}
		if task.Verifier.Timeout <= 0 {
			t.Error("no time to judge")
		}
	})
}
