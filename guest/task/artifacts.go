package task

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// judging reads our own section, and what of the rest concerns judging.
func (r *reader) judging(t *Task, d *document) {
	const section = "forkvm.judging."
	s := &d.ForkVM.Judging
	mode := r.word("verifier.environment_mode", d.Verifier.EnvironmentMode, "", "shared", "separate")
	otherwise := Both
	if mode == "separate" {
		otherwise = Transplant // a machine of its own is what this asks for
	}
	j := Judging{
		Where:           Where(r.word(section+"where", s.Where, string(otherwise), string(Both), string(Fork), string(Transplant))),
		WorkTree:        s.WorkTree,
		Exclude:         r.patterns(section+"exclude", s.Exclude),
		Score:           Score(r.word(section+"score", s.Score, string(ScoreReward), string(ScoreReward), string(ScoreExitCode), string(ScoreJUnit))),
		JUnit:           s.JUnit,
		FreeToolchain:   r.word(section+"toolchain", s.Toolchain, "fixed", "fixed", "free") == "free",
		Protect:         s.Protect,
		ArtifactBytes:   r.bytes(section+"artifact_bytes", s.ArtifactBytes, DefaultArtifactBytes),
		ArtifactEntries: DefaultArtifactEntries,
	}
	if n := s.ArtifactEntries; n != nil {
		j.ArtifactEntries = r.count(section+"artifact_entries", *n, 10_000_000)
	}
	switch {
	case j.Score == ScoreJUnit && j.JUnit == "":
		j.JUnit = "/logs/verifier/junit.xml"
	case j.Score != ScoreJUnit && j.JUnit != "":
		r.fail(section+"junit", "names a report, but score is %q", j.Score)
	}
	if j.JUnit != "" {
		r.path(section+"junit", j.JUnit)
	}
	for i, p := range j.Protect {
		r.path(fmt.Sprintf("%sprotect[%d]", section, i), p)
	}
	if s.Artifacts != nil {
		j.Artifacts = r.artifacts(section+"artifacts", *s.Artifacts)
	} else {
		j.Artifacts = r.artifacts("artifacts", d.Artifacts)
	}
	if len(j.Exclude) > 0 && j.WorkTree == "" {
		r.fail(section+"exclude", "belongs to work_tree, of which there is none")
	}
	if j.WorkTree != "" {
		r.path(section+"work_tree", j.WorkTree)
	}
	t.Judging = j
	if j.WorkTree == "" && len(j.Artifacts) == 0 && j.Where != Fork {
		t.defaultArtifact()
	}
	r.destinations(&t.Judging)
}

// defaultArtifact is the directory in which the policy works, if the task declares
// nothing else.
func (t *Task) defaultArtifact() {
	if dir := t.Environment.WorkDir; dir != "" && dir != "/" {
		t.Judging.Artifacts = []Artifact{{Source: dir}}
		return
	}
	t.Warnings = append(t.Warnings, configFile+": neither forkvm.judging.work_tree nor artifacts nor environment.workdir says what is transplanted: "+
		"a transplant judges the environment as it was")
}

// Places that are the verifier's: nothing is transplanted there.
var verifiers = []string{"/tests", "/logs/verifier", "/solution"}

// Check finds artifacts that cannot be transplanted, for a Judging that was not read
// from a task.
func (j *Judging) Check() error {
	r := reader{}
	for _, a := range j.Artifacts {
		r.path("artifacts", a.Source)
		if _, err := path.Match(a.Source, "x"); err != nil {
			r.fail("artifacts", "%.200q: %w", a.Source, err)
		}
	}
	if j.WorkTree != "" {
		r.path("work_tree", j.WorkTree)
	}
	r.destinations(j)
	for i, err := range r.errs {
		var e *Error
		if errors.As(err, &e) {
			r.errs[i] = fmt.Errorf("%s: %w", e.Field, e.Err) // there is no file
		}
	}
	return errors.Join(r.errs...)
}

// destinations checks that no two artifacts meet: what the first brings could
// otherwise lead the second elsewhere.
func (r *reader) destinations(j *Judging) {
	var all []string
	for _, a := range j.Artifacts {
		d := a.Destination
		if d == "" {
			d = a.Source
		}
		all = append(all, d)
	}
	if j.WorkTree != "" {
		all = append(all, j.WorkTree)
	}
	for i, d := range all {
		field := "artifacts"
		if j.WorkTree != "" && i == len(all)-1 {
			field = "forkvm.judging.work_tree"
		}
		if d == "/" {
			r.fail(field, "the whole file system cannot be transplanted")
			continue
		}
		for _, v := range verifiers {
			if overlap(d, v) {
				r.fail(field, "%s and the verifier's %s are not apart", d, v)
			}
		}
		for _, other := range all[:i] {
			if overlap(d, other) {
				r.fail(field, "%s and %s are not apart", other, d)
			}
		}
	}
}

// overlap says whether one of two paths is, or may be, in the other.
func overlap(a, b string) bool {
	as, bs := strings.Split(a, "/"), strings.Split(b, "/")
	for i := range min(len(as), len(bs)) {
		if !mayBeSame(as[i], bs[i]) {
			return false
		}
	}
	return true
}

// mayBeSame says whether two names, or patterns of names, can stand for the same. Of
// two patterns nobody knows.
func mayBeSame(a, b string) bool {
	switch aPattern, bPattern := isPattern(a), isPattern(b); {
	case aPattern && bPattern:
		return true
	case aPattern:
		a, b = b, a
		fallthrough
	case bPattern:
		same, err := path.Match(b, a)
		return same || err != nil
	}
	return a == b
}

func isPattern(s string) bool { return strings.ContainsAny(s, `*?[\`) }

func (r *reader) artifacts(field string, list []any) []Artifact {
	var artifacts []Artifact
	for i, entry := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		switch v := entry.(type) {
		case string:
			artifacts = append(artifacts, r.artifact(at, map[string]any{"source": v}))
		case map[string]any:
			artifacts = append(artifacts, r.artifact(at, v))
		default:
			r.fail(at, "is neither a path nor a table with source, destination and exclude")
		}
	}
	return artifacts
}

func (r *reader) artifact(field string, table map[string]any) (a Artifact) {
	for name, value := range table {
		ok := true
		switch name {
		case "source":
			a.Source, ok = value.(string)
		case "destination":
			a.Destination, ok = value.(string)
		case "exclude":
			var list []any
			list, ok = value.([]any)
			for _, v := range list {
				s, isText := v.(string)
				ok = ok && isText
				a.Exclude = append(a.Exclude, s)
			}
		default:
			r.fail(field+"."+name, "is not known: an artifact has source, destination and exclude")
		}
		if !ok {
			r.fail(field+"."+name, "has a value of another kind than it should")
		}
	}
	a.Source, a.Destination = trimSlash(a.Source), trimSlash(a.Destination)
	r.path(field+".source", a.Source)
	if _, err := path.Match(a.Source, "x"); err != nil {
		r.fail(field+".source", "%.200q: %w", a.Source, err)
	}
	if a.Destination != "" {
		r.path(field+".destination", a.Destination)
		if isPattern(a.Source) {
			r.fail(field+".destination", "a pattern that may be of many files has none")
		}
	}
	a.Exclude = r.patterns(field+".exclude", a.Exclude)
	return a
}

// trimSlash takes the slash off with which people mark directories.
func trimSlash(p string) string {
	if len(p) > 1 {
		return strings.TrimSuffix(p, "/")
	}
	return p
}

func (r *reader) patterns(field string, list []string) []string {
	for _, p := range list {
		if _, err := path.Match(p, "x"); err != nil || p == "" || strings.Contains(p, "/") {
			r.fail(field, "%.80q is no pattern of a name", p)
		}
	}
	return list
}

// bytes is a size, a number or as text.
func (r *reader) bytes(field string, value any, otherwise int64) int64 {
	switch v := value.(type) {
	case nil:
		return otherwise
	case int64:
		return r.count(field, v, 1<<50)
	case string:
		n, err := parseSize(v)
		if err != nil {
			r.fail(field, "%w", err)
		}
		return n
	}
	r.fail(field, "is no size")
	return otherwise
}
