package task

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// defaultTimeout is how long a verifier has, and a build, if the task does not say.
const defaultTimeout = 600 * time.Second

func (r *reader) task(d *document) *Task {
	t := &Task{
		Name:          d.Task.Name,
		SchemaVersion: r.version(d),
		Agent: Agent{
			Timeout: r.seconds("agent.timeout_sec", d.Agent.Timeout, 0),
			User:    r.user("agent.user", d.Agent.User),
			Network: r.network("agent", d.Agent.networkFields),
		},
		Verifier: Verifier{
			Timeout: r.seconds("verifier.timeout_sec", d.Verifier.Timeout, defaultTimeout),
			Env:     d.Verifier.Env,
			User:    r.user("verifier.user", d.Verifier.User),
			Network: r.network("verifier", d.Verifier.networkFields),
		},
		Environment: r.environment(&d.Environment),
		SolutionEnv: d.Solution.Env,
		StepRewards: r.word("multi_step_reward_strategy", d.StepRewards, "mean", "mean", "final"),
	}
	for _, e := range []struct {
		field string
		env   map[string]string
	}{{"verifier.env", t.Verifier.Env}, {"environment.env", t.Environment.Env}, {"solution.env", t.SolutionEnv}} {
		r.env(e.field, e.env)
	}
	if t.Verifier.Timeout == 0 {
		r.fail("verifier.timeout_sec", "is 0: nothing could be judged")
	}
	t.Steps = r.steps(d.Steps)
	r.judging(t, d)
	return t
}

// version is the schema's, which older tasks call version.
func (r *reader) version(d *document) string {
	version, field := d.SchemaVersion, "schema_version"
	if version == nil {
		version, field = d.Version, "version"
	}
	if version == nil {
		return ""
	}
	if major, _, _ := strings.Cut(*version, "."); major != "1" {
		r.fail(field, "%.40q is not one of 1.0 to 1.3, which this program reads", *version)
	}
	return *version
}

func (r *reader) network(section string, n networkFields) Network {
	mode := r.word(section+".network_mode", n.Mode, "", "public", "no-network", "allowlist")
	field := section + ".allowed_hosts"
	if mode != "allowlist" && mode != "" && len(n.Hosts) > 0 {
		r.fail(field, "says which hosts, but network_mode is %q", mode)
	}
	for _, h := range n.Hosts {
		if name := strings.TrimPrefix(h, "*."); name == "" || strings.ContainsAny(name, "*/: \t\x00") {
			r.fail(field, "%.80q is neither a host's name nor *.NAME", h)
		}
	}
	return Network{Mode: mode, Hosts: n.Hosts}
}

func (r *reader) environment(s *environmentSection) Environment {
	e := Environment{
		BuildTimeout: r.seconds("environment.build_timeout_sec", s.BuildTimeout, defaultTimeout),
		Image:        s.Image,
		OS:           r.word("environment.os", s.OS, "linux", "linux"),
		CPUs:         int(r.count("environment.cpus", s.CPUs, 1024)),
		MemoryMB:     r.megabytes("environment.memory", s.MemoryMB, s.Memory),
		StorageMB:    r.megabytes("environment.storage", s.StorageMB, s.Storage),
		WorkDir:      s.WorkDir,
		Env:          s.Env,
		Network:      r.network("environment", s.networkFields),
	}
	if s.GPUs > 0 {
		r.fail("environment.gpus", "%d: machines have no GPUs", s.GPUs)
	}
	if e.WorkDir != "" {
		r.path("environment.workdir", e.WorkDir)
	}
	if s.AllowInternet != nil {
		mode := map[bool]string{true: "public", false: "no-network"}[*s.AllowInternet]
		if e.Network.Mode != "" && e.Network.Mode != mode {
			r.fail("environment.allow_internet", "%v and network_mode %q exclude each other", *s.AllowInternet, e.Network.Mode)
		}
		e.Network.Mode = mode
	}
	e.Healthcheck = r.healthcheck(s.Healthcheck)
	return e
}

func (r *reader) healthcheck(s *healthcheckSection) *Healthcheck {
	if s == nil {
		return nil
	}
	const section = "environment.healthcheck."
	h := &Healthcheck{
		Command:     s.Command,
		Interval:    r.seconds(section+"interval_sec", s.Interval, 5*time.Second),
		Timeout:     r.seconds(section+"timeout_sec", s.Timeout, 30*time.Second),
		StartPeriod: r.seconds(section+"start_period_sec", s.StartPeriod, 0),
		Retries:     3,
	}
	if s.Retries != nil {
		h.Retries = int(r.count(section+"retries", *s.Retries, 1_000_000))
	}
	if h.Command == "" {
		r.fail(section+"command", "is missing")
	}
	return h
}

func (r *reader) count(field string, n, most int64) int64 {
	if n < 0 || n > most {
		r.fail(field, "%d is not from 0 to %d", n, most)
		return 0
	}
	return n
}

// megabytes is a size under its newer name, a number of MB, or under its older one,
// such as "2G".
func (r *reader) megabytes(field string, mb int64, old string) int {
	const most = 1 << 30
	if old == "" {
		return int(r.count(field+"_mb", mb, most))
	}
	bytes, err := parseSize(old)
	if err != nil {
		r.fail(field, "%w", err)
		return 0
	}
	size := r.count(field, bytes>>20, most)
	if mb != 0 && mb != size {
		r.fail(field, "%q is not the %d MB of %s_mb", old, mb, path.Base(field))
	}
	return int(size)
}

// parseSize reads "512", "512M", "2G", "2GB", "2Gi": powers of 1024.
func parseSize(s string) (int64, error) {
	digits := strings.TrimRight(strings.ToUpper(strings.TrimSpace(s)), "KMGTIB")
	unit := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(strings.TrimSpace(s))[len(digits):], "B"), "I")
	shift, known := map[string]int{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[unit]
	n, err := strconv.ParseFloat(digits, 64)
	if err != nil || !known || !(n >= 0 && n < 1<<20) && shift > 0 || !(n >= 0 && n < 1<<50) {
		return 0, fmt.Errorf("%.40q is no size such as 512M or 2G", s)
	}
	return int64(n * float64(int64(1)<<shift)), nil
}

func (r *reader) env(field string, env map[string]string) {
	for name, value := range env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.IndexByte(value, 0) >= 0 {
			r.fail(field, "%.80q is no variable", name)
			continue
		}
		if _, err := Expand(value, func(string) (string, bool) { return "", true }); err != nil {
			r.fail(field+"."+name, "%w", err)
		}
	}
}

func (r *reader) steps(sections []stepSection) []Step {
	var steps []Step
	for i, s := range sections {
		field := fmt.Sprintf("steps[%d].", i)
		if s.Name == "" || s.Name == "." || s.Name == ".." || strings.ContainsAny(s.Name, "/\x00") {
			r.fail(field+"name", "%.80q is no name of a directory", s.Name)
		}
		if slices.ContainsFunc(steps, func(other Step) bool { return other.Name == s.Name }) {
			r.fail(field+"name", "%.80q is there twice", s.Name)
		}
		if m := s.MinReward; m != nil && !(*m >= 0 && *m <= 1) {
			r.fail(field+"min_reward", "%v is not from 0 to 1", *m)
		}
		steps = append(steps, Step{Name: s.Name, MinReward: s.MinReward})
	}
	return steps
}

// path checks an absolute path of a guest, without detours.
func (r *reader) path(field, p string) {
	if !path.IsAbs(p) || path.Clean(p) != p || strings.IndexByte(p, 0) >= 0 || len(p) > 4095 {
		r.fail(field, "%.200q is no absolute path in its shortest form", p)
	}
}
