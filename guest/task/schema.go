package task

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// document is task.toml as it is written.
type document struct {
	SchemaVersion *string `toml:"schema_version"`
	Version       *string `toml:"version"` // before 1.1
	Task          struct {
		Name        string   `toml:"name"`
		Description string   `toml:"description"`
		Keywords    []string `toml:"keywords"`
		Authors     []any    `toml:"authors"`
	} `toml:"task"`
	Metadata    map[string]any     `toml:"metadata"`
	Agent       agentSection       `toml:"agent"`
	Verifier    verifierSection    `toml:"verifier"`
	Environment environmentSection `toml:"environment"`
	Solution    struct {
		Env map[string]string `toml:"env"`
	} `toml:"solution"`
	Source      string        `toml:"source"`
	Artifacts   []any         `toml:"artifacts"`
	Steps       []stepSection `toml:"steps"`
	StepRewards string        `toml:"multi_step_reward_strategy"`
	ForkVM      struct {
		Judging judgingSection `toml:"judging"`
	} `toml:"forkvm"`
}

type networkFields struct {
	Mode  string   `toml:"network_mode"`
	Hosts []string `toml:"allowed_hosts"`
}

type agentSection struct {
	Timeout *float64 `toml:"timeout_sec"`
	User    any      `toml:"user"`
	networkFields
}

type verifierSection struct {
	Timeout         *float64          `toml:"timeout_sec"`
	Env             map[string]string `toml:"env"`
	User            any               `toml:"user"`
	EnvironmentMode string            `toml:"environment_mode"`
	networkFields
}

type environmentSection struct {
	BuildTimeout *float64          `toml:"build_timeout_sec"`
	Image        string            `toml:"docker_image"`
	OS           string            `toml:"os"`
	CPUs         int64             `toml:"cpus"`
	MemoryMB     int64             `toml:"memory_mb"`
	StorageMB    int64             `toml:"storage_mb"`
	GPUs         int64             `toml:"gpus"`
	WorkDir      string            `toml:"workdir"`
	Env          map[string]string `toml:"env"`
	networkFields
	Healthcheck *healthcheckSection `toml:"healthcheck"`
	// Older names.
	Memory        string `toml:"memory"`
	Storage       string `toml:"storage"`
	AllowInternet *bool  `toml:"allow_internet"`
}

type healthcheckSection struct {
	Command     string   `toml:"command"`
	Interval    *float64 `toml:"interval_sec"`
	Timeout     *float64 `toml:"timeout_sec"`
	StartPeriod *float64 `toml:"start_period_sec"`
	Retries     *int64   `toml:"retries"`
}

type stepSection struct {
	Name      string         `toml:"name"`
	MinReward *float64       `toml:"min_reward"`
	Agent     map[string]any `toml:"agent"`
	Verifier  map[string]any `toml:"verifier"`
	Artifacts []any          `toml:"artifacts"`
}

type judgingSection struct {
	Where           string   `toml:"where"`
	WorkTree        string   `toml:"work_tree"`
	Exclude         []string `toml:"exclude"`
	Artifacts       *[]any   `toml:"artifacts"`
	Score           string   `toml:"score"`
	JUnit           string   `toml:"junit"`
	Toolchain       string   `toml:"toolchain"`
	Protect         []string `toml:"protect"`
	ArtifactBytes   any      `toml:"artifact_bytes"`
	ArtifactEntries *int64   `toml:"artifact_entries"`
}

// ownSection is where an unknown name is a mistake.
const ownSection = "forkvm"

// free are the keys below which values have any form; some are read by hand.
var free = []string{"metadata.", "task.authors.", "artifacts.", "forkvm.judging.artifacts.", "steps.agent.", "steps.verifier.", "steps.artifacts."}

// parse reads task.toml.
func parse(text []byte) (*Task, error) {
	var d document
	meta, err := toml.Decode(string(text), &d)
	if err != nil {
		return nil, &Error{File: configFile, Field: fieldOf(err), Err: tomlCause(err)}
	}
	r := reader{}
	t := r.task(&d)
	for _, key := range meta.Undecoded() {
		if slices.ContainsFunc(free, func(prefix string) bool { return strings.HasPrefix(key.String(), prefix) }) {
			continue
		}
		if key[0] == ownSection {
			r.fail(key.String(), "is not known; there are where, work_tree, exclude, artifacts, score, junit, toolchain, protect, artifact_bytes and artifact_entries")
			continue
		}
		t.Warnings = append(t.Warnings, fmt.Sprintf("%s: %s is not known and has no effect", configFile, key))
	}
	if err := errors.Join(r.errs...); err != nil {
		return nil, err
	}
	return t, nil
}

// fieldOf is the key at which a document could not be read.
func fieldOf(err error) string {
	var p toml.ParseError
	if errors.As(err, &p) {
		return p.LastKey
	}
	return ""
}

func tomlCause(err error) error {
	var p toml.ParseError
	if errors.As(err, &p) {
		return fmt.Errorf("line %d: %s", p.Position.Line, strings.TrimPrefix(p.Message, "toml: "))
	}
	return errors.New(strings.TrimPrefix(err.Error(), "toml: "))
}

// reader turns a document into a task and collects what is wrong with it.
type reader struct{ errs []error }

func (r *reader) fail(field, format string, a ...any) {
	r.errs = append(r.errs, &Error{File: configFile, Field: field, Err: fmt.Errorf(format, a...)})
}

// word checks a value that is one of a few.
func (r *reader) word(field, value, otherwise string, from ...string) string {
	if value == "" {
		return otherwise
	}
	if !slices.Contains(from, value) {
		r.fail(field, "%.80q is none of %s", value, strings.Join(from, ", "))
	}
	return value
}

// seconds is a duration, otherwise if there is none.
func (r *reader) seconds(field string, value *float64, otherwise time.Duration) time.Duration {
	if value == nil {
		return otherwise
	}
	const most = 30 * 24 * 3600
	if math.IsNaN(*value) || *value < 0 || *value > most {
		r.fail(field, "%v is no number of seconds from 0 to %d", *value, most)
		return otherwise
	}
	return time.Duration(*value * float64(time.Second))
}

// user is a name or a number.
func (r *reader) user(field string, value any) string {
	switch v := value.(type) {
	case nil:
		return ""
	case string:
		if len(v) > 256 || strings.ContainsAny(v, "\x00\n") {
			r.fail(field, "%.40q is no user", v)
		}
		return v
	case int64:
		if v < 0 || v >= math.MaxUint32 {
			r.fail(field, "%d is no user", v)
		}
		return fmt.Sprint(v)
	}
	r.fail(field, "is neither a name nor a number")
	return ""
}
