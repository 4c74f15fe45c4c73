package judge

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/agent/tree"
)

// fakeFile is a file of a fake guest.
type fakeFile struct {
	kind    client.Kind
	content string // or a link's target
	mode    fs.FileMode
	uid     int
}

// fakeGuest is a guest in memory. Its verifier is a function.
type fakeGuest struct {
	mu    sync.Mutex
	files map[string]fakeFile
	// run is what Exec does with the guest.
	run func(g *fakeGuest, c client.Command) (client.Result, error)
	// survey is what Survey finds besides; nil: nothing.
	survey client.Survey
	quiet  []client.Quieted // one for each call, the last again and again
	// errs are answers to operations, by their words.
	errs map[string]error
	// calls are the operations, in order.
	calls    []string
	commands []client.Command
}

// fakeMachine is a machine of a fake node.
type fakeMachine struct {
	id     string
	guest  *fakeGuest
	mu     sync.Mutex
	health Health
	noted  bool // what it used, while it was open
	closed bool
}

func (m *fakeMachine) ID() string   { return m.id }
func (m *fakeMachine) Guest() Guest { return m.guest }
func (m *fakeMachine) Health(context.Context) Health {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.health
}
func (m *fakeMachine) NoteUse() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.noted = !m.closed
}
func (m *fakeMachine) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

func (m *fakeMachine) end(h Health) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.health = h
}

// fakeMachines makes machines.
type fakeMachines struct {
	mu sync.Mutex
	// rollout and snapshot are the files of forks and of clean machines.
	rollout, snapshot map[string]fakeFile
	// prepare changes a machine that was just made, in the n-th attempt from 0 on.
	prepare func(m *fakeMachine, isFork bool, attempt int)
	// forkErrs and cleanErrs are for attempts, nil for none.
	forkErrs, cleanErrs []error
	made                []*fakeMachine
	forks, cleans       int
	run                 func(g *fakeGuest, c client.Command) (client.Result, error)
}

// working is a rollout whose solution is right, and whose verifier sees that.
func working() *fakeMachines {
	return &fakeMachines{
		rollout:  map[string]fakeFile{"/work": {kind: client.KindDirectory, mode: 0o755}, "/work/answer": {client.KindFile, "42\n", 0o644, 1000}},
		snapshot: map[string]fakeFile{"/work": {kind: client.KindDirectory, mode: 0o755}, "/work/question": {client.KindFile, "?", 0o644, 0}},
		run:      judgeAnswer,
	}
}

// judgeAnswer is a verifier: the answer is 42.
func judgeAnswer(g *fakeGuest, _ client.Command) (client.Result, error) {
	reward := "0"
	if g.files["/work/answer"].content == "42\n" {
		reward = "1"
	}
	g.write(rewardText, reward+"\n")
	return client.Result{DurationMS: 7}, nil
}

func (f *fakeMachines) make(isFork bool) (Machine, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	counter, errs, files := &f.cleans, f.cleanErrs, f.snapshot
	if isFork {
		counter, errs, files = &f.forks, f.forkErrs, f.rollout
	}
	attempt := *counter
	*counter++
	if attempt < len(errs) && errs[attempt] != nil {
		return nil, errs[attempt]
	}
	m := &fakeMachine{id: fmt.Sprintf("m%d", len(f.made)), guest: &fakeGuest{files: maps.Clone(files), run: f.run, errs: map[string]error{}}}
	m.guest.survey.Self = client.ProcessInfo{PID: 1, Start: 5, Program: "/init", Inode: 3}
	if f.prepare != nil {
		f.prepare(m, isFork, attempt)
	}
	f.made = append(f.made, m)
	return m, nil
}

func (f *fakeMachines) Fork(context.Context) (Machine, error)  { return f.make(true) }
func (f *fakeMachines) Clean(context.Context) (Machine, error) { return f.make(false) }

// surveys counts the requests for one.
func (f *fakeMachines) surveys() (n int) {
	for _, machine := range f.made {
		for _, call := range machine.guest.calls {
			if call == "survey" {
				n++
			}
		}
	}
	return n
}

// leftOpen are machines that nobody has closed.
func (f *fakeMachines) leftOpen() (open []string) {
	for _, m := range f.made {
		if !m.closed {
			open = append(open, m.id)
		}
	}
	return open
}

func refusal(code string) error {
	return fmt.Errorf("in guest: %w", &client.Error{Code: code, Message: code})
}

func lost(op string) error {
	return &client.ConnectionError{Op: op, Started: true, Err: io.ErrUnexpectedEOF}
}

// begin notes an operation and returns its planned error. g.mu is held from then on
// until the returned function is called.
func (g *fakeGuest) begin(op string) (func(), error) {
	g.mu.Lock()
	g.calls = append(g.calls, op)
	return g.mu.Unlock, g.errs[op]
}

func (g *fakeGuest) write(path, content string) {
	g.files[path] = fakeFile{client.KindFile, content, 0o644, 0}
}

func (g *fakeGuest) Exec(_ context.Context, c client.Command) (client.Result, error) {
	end, err := g.begin("exec")
	defer end()
	if err != nil {
		return client.Result{}, err
	}
	g.commands = append(g.commands, c)
	return g.run(g, c)
}

func (g *fakeGuest) Survey(_ context.Context, l client.Look) (client.Survey, error) {
	end, err := g.begin("survey")
	defer end()
	return g.look(l), err
}

// look is what is there. Links lead nowhere.
func (g *fakeGuest) look(l client.Look) client.Survey {
	s := g.survey
	for _, name := range l.Exact {
		if f, ok := g.files[name]; ok {
			found := client.SurveyedFile{Path: proto.Text(name), FileInfo: proto.FileInfo{Kind: string(f.kind), Size: int64(len(f.content))}}
			found.Content = []byte(f.content)[:min(len(f.content), proto.MaxContent)]
			s.Files = append(s.Files, found)
		}
	}
	if l.Tree != "" {
		s.Sum = g.sum(l.Tree)
	}
	return s
}

func (g *fakeGuest) sum(dir string) string {
	entries := map[string]tree.Entry{}
	for name, f := range g.files {
		rest, inside := strings.CutPrefix(name, dir+"/")
		if !inside {
			continue
		}
		switch f.kind {
		case client.KindDirectory:
			entries[rest] = tree.Entry{Mode: fs.ModeDir | f.mode.Perm()}
		case client.KindLink:
			entries[rest] = tree.Entry{Mode: fs.ModeSymlink, Target: f.content}
		default:
			entries[rest] = tree.Entry{Mode: f.mode.Perm(), SHA256: sha256.Sum256([]byte(f.content))}
		}
	}
	return tree.Sum(entries)
}

func (g *fakeGuest) Quiesce(_ context.Context, q client.Quiescence) (client.Quieted, error) {
	end, err := g.begin("quiesce")
	defer end()
	var r client.Quieted
	if err == nil && len(g.quiet) > 0 {
		r = g.quiet[0]
		if len(g.quiet) > 1 {
			g.quiet = g.quiet[1:]
		}
	}
	if q.Look != nil {
		found := g.look(*q.Look)
		r.Survey = &found
	}
	return r, err
}

func (g *fakeGuest) Vacate(_ context.Context, directories ...client.EmptyDirectory) (client.Vacated, error) {
	end, err := g.begin("vacate")
	defer end()
	if err == nil {
		g.vacate(directories)
	}
	return client.Vacated{}, err
}

func (g *fakeGuest) vacate(directories []client.EmptyDirectory) {
	for _, d := range directories {
		g.remove(d.Path)
		g.files[d.Path] = fakeFile{kind: client.KindDirectory, mode: d.Mode}
	}
}

func (g *fakeGuest) remove(name string) {
	for have := range g.files {
		if have == name || strings.HasPrefix(have, name+"/") {
			delete(g.files, have)
		}
	}
}

func (g *fakeGuest) PlaceTree(_ context.Context, p client.Placement, r io.Reader) (stats client.TreeStats, err error) {
	end, err := g.begin("put_tree")
	defer end()
	if err != nil {
		return stats, err
	}
	g.vacate(p.Vacate)
	if p.Replace {
		for name := range g.files {
			if path.Dir(name) == p.Dir && !excluded(path.Base(name), p.Spare) {
				g.remove(name)
			}
		}
	}
	if err := g.unpack(p, r); err != nil {
		return stats, err
	}
	if p.Sum {
		stats.Sum = g.sum(p.Dir)
	}
	return stats, nil
}

func (g *fakeGuest) unpack(p client.Placement, r io.Reader) error {
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		b, err := io.ReadAll(archive)
		if err != nil {
			return err
		}
		f := fakeFile{client.KindFile, string(b), fs.FileMode(h.Mode), 0}
		if p.Owners {
			f.uid = h.Uid
		}
		switch h.Typeflag {
		case tar.TypeDir:
			f.kind = client.KindDirectory
		case tar.TypeSymlink:
			f.kind, f.content = client.KindLink, h.Linkname
		}
		g.files[path.Join(p.Dir, h.Name)] = f
	}
}

func (g *fakeGuest) GetExactTree(_ context.Context, dir string, w io.Writer) (client.TreeStats, error) {
	end, err := g.begin("get_tree")
	defer end()
	if err != nil {
		return client.TreeStats{}, err
	}
	switch f, ok := g.files[dir]; {
	case !ok:
		return client.TreeStats{}, refusal(proto.CodeFileNotFound)
	case f.kind != client.KindDirectory:
		return client.TreeStats{}, refusal(proto.CodeNotADirectory)
	}
	archive := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(g.files)) {
		rest, inside := strings.CutPrefix(name, dir+"/")
		if !inside {
			continue
		}
		f := g.files[name]
		h := tar.Header{Typeflag: tar.TypeReg, Name: "./" + rest, Mode: int64(f.mode.Perm()), Uid: f.uid, Size: int64(len(f.content))}
		switch f.kind {
		case client.KindDirectory:
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		case client.KindLink:
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, f.content, 0
		case client.KindOther:
			h.Typeflag = tar.TypeChar
		}
		if err := archive.WriteHeader(&h); err != nil {
			return client.TreeStats{}, err
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := archive.Write([]byte(f.content)); err != nil {
				return client.TreeStats{}, err
			}
		}
	}
	return client.TreeStats{}, archive.Close()
}

func (g *fakeGuest) Get(_ context.Context, name string, w io.Writer) (client.File, error) {
	end, err := g.begin("get")
	defer end()
	if err != nil {
		return client.File{}, err
	}
	f, ok := g.files[name]
	if !ok {
		return client.File{}, refusal(proto.CodeFileNotFound)
	}
	if _, err := io.Copy(w, bytes.NewReader([]byte(f.content))); err != nil {
		return client.File{}, fmt.Errorf("write data: %w", err)
	}
	return client.File{Size: int64(len(f.content))}, nil
}

func (g *fakeGuest) Stat(_ context.Context, name string) (client.File, error) {
	end, err := g.begin("stat")
	defer end()
	if err != nil {
		return client.File{}, err
	}
	f, ok := g.files[name]
	if !ok {
		return client.File{}, refusal(proto.CodeFileNotFound)
	}
	return client.File{Path: name, Kind: f.kind, Mode: f.mode, UID: uint32(f.uid), Size: int64(len(f.content))}, nil
}

func (g *fakeGuest) List(_ context.Context, dir string) ([]client.File, error) {
	end, err := g.begin("list")
	defer end()
	if err != nil {
		return nil, err
	}
	var list []client.File
	for _, name := range slices.Sorted(maps.Keys(g.files)) {
		if path.Dir(name) == dir {
			list = append(list, client.File{Path: path.Base(name), Kind: g.files[name].kind})
		}
	}
	return list, nil
}

func (g *fakeGuest) Remove(_ context.Context, name string, _ bool) error {
	end, err := g.begin("remove")
	defer end()
	if err != nil {
		return err
	}
	g.remove(name)
	return nil
}

var errHost = errors.New("the host has no memory")

// check compares an outcome and its number, nil for none.
func check(t *testing.T, what string, o Outcome, reward *float64, wantOutcome Outcome, want *float64) {
	t.Helper()
	same := (reward == nil) == (want == nil) && (reward == nil || *reward == *want)
	if o != wantOutcome || !same {
		t.Errorf("%s: got %s, want %s", what, summarize(o, reward, ""), summarize(wantOutcome, want, ""))
	}
}

func number(n float64) *float64 { return &n }
