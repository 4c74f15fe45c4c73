package agent_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/testkit"
)

func TestExecOutcome(t *testing.T) {
	g := start(t, agent.Config{})
	script := filepath.Join(g.dir, "no-loader")
	os.WriteFile(script, []byte("#!/does/not/exist\n"), 0o755)
	plain := filepath.Join(g.dir, "plain")
	os.WriteFile(plain, []byte("x"), 0o644)
	junk := filepath.Join(g.dir, "junk")
	os.WriteFile(junk, []byte("junk"), 0o755)
	tests := []struct {
		name string
		cmd  client.Command
		exit int
		sig  int
		code string
	}{
		{"success", client.Command{Args: []string{"true"}}, 0, 0, ""},
		{"own code", client.Command{Args: []string{"sh", "-c", "exit 42"}}, 42, 0, ""},
		{"killed", client.Command{Args: []string{"sh", "-c", "kill -SEGV $$"}}, 139, 11, ""},
		{"not in PATH", client.Command{Args: []string{"no-such-command"}}, 127, 0, proto.CodeCommandNotFound},
		{"no such file", client.Command{Args: []string{"/no/such/file"}}, 127, 0, proto.CodeCommandNotFound},
		{"below a file", client.Command{Args: []string{plain + "/x"}}, 127, 0, proto.CodeCommandNotFound},
		{"a directory", client.Command{Args: []string{g.dir}}, 126, 0, proto.CodeCommandNotExecutable},
		{"not executable", client.Command{Args: []string{plain}}, 126, 0, proto.CodeCommandNotExecutable},
		{"not executable, in PATH", client.Command{Args: []string{"plain"}, Env: []string{"PATH=/nowhere:" + g.dir}}, 126, 0, proto.CodeCommandNotExecutable},
		{"no interpreter", client.Command{Args: []string{script}}, 126, 0, proto.CodeCommandNotExecutable},
		{"not a program", client.Command{Args: []string{junk}}, 126, 0, proto.CodeCommandNotExecutable},
		{"no directory", client.Command{Args: []string{"true"}, Dir: "/no/such/dir"}, 126, 0, proto.CodeDirectoryNotFound},
		{"directory is a file", client.Command{Args: []string{"true"}, Dir: plain}, 126, 0, proto.CodeDirectoryNotFound},
		{"no user", client.Command{Args: []string{"true"}, User: "no-such-user"}, 126, 0, proto.CodeUserNotFound},
		{"no group", client.Command{Args: []string{"true"}, User: "root:no-such-group"}, 126, 0, proto.CodeUserNotFound},
		{"relative to directory", client.Command{Args: []string{"./true"}, Dir: "/bin"}, 0, 0, ""},
		{"empty PATH entry is the directory", client.Command{Args: []string{"true"}, Dir: "/bin", Env: []string{"PATH="}}, 0, 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, _ := g.run(t, tt.cmd)
			code := ""
			if r.Error != nil {
				code = r.Error.Code
				t.Log(r.Error.Message)
			}
			if r.ExitCode != tt.exit || r.Signal != tt.sig || code != tt.code || r.TimedOut || r.OOMKilled {
				t.Errorf("got %+v (error %q), want exit code %d, signal %d, error %q", r, code, tt.exit, tt.sig, tt.code)
			}
		})
	}
}

func TestExecRefusesNonsense(t *testing.T) {
	g := start(t, agent.Config{})
	for name, cmd := range map[string]client.Command{
		"no command":     {},
		"empty command":  {Args: []string{""}},
		"NUL":            {Args: []string{"true", "a\x00b"}},
		"negative limit": {Args: []string{"true"}, StdoutLimit: -1},
	} {
		_, err := g.Exec(context.Background(), cmd)
		if !errors.Is(err, &client.Error{Code: proto.CodeInvalidRequest}) {
			t.Errorf("%s: error %v, want invalid_request", name, err)
		}
	}
}

func TestExecSurroundings(t *testing.T) {
	g := start(t, agent.Config{})
	tests := []struct {
		name string
		cmd  client.Command
		want string
	}{
		{"arguments as they are", client.Command{Args: []string{"printf", `[%s]`, "a b", "", "\xff\n", "*", "ü"}}, "[a b][][\xff\n][*][ü]"},
		{"directory", client.Command{Args: []string{"pwd"}, Dir: "/usr/bin"}, "/usr/bin\n"},
		{"environment is exact", client.Command{Args: []string{"/usr/bin/env"}, Env: []string{"A=1", "B=\xfe=", "A=2"}, ClearEnv: true}, "A=2\nB=\xfe=\n"},
		{"default environment", client.Command{Args: []string{"sh", "-c", "echo $PATH $HOME"}, User: "0"}, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /root\n"},
		{"no terminal, no input", client.Command{Args: []string{"sh", "-c", "cat; test -t 0 || echo none"}}, "none\n"},
		{"own session", client.Command{Args: []string{"sh", "-c", `read -r a b c d e s rest </proc/$$/stat; test $s = $$ && echo leader`}}, "leader\n"},
		{"both streams in order", client.Command{Args: []string{"sh", "-c", "echo 1; echo 2 >&2; echo 3; echo 4 >&2"}}, "1\n2\n3\n4\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			tt.cmd.Stdout, tt.cmd.Stderr = &out, &out
			r, _ := g.run(t, tt.cmd)
			if r.ExitCode != 0 || out.String() != tt.want {
				t.Errorf("exit code %d (%v), output %q, want %q", r.ExitCode, r.Error, out.String(), tt.want)
			}
		})
	}
}

func TestExecAsUser(t *testing.T) {
	testkit.RequireRoot(t)
	g := start(t, agent.Config{})
	const id = `echo "$(id -u) $(id -g) $(id -G)"`
	for user, want := range map[string]string{
		"1234":      "1234 0 0",
		"1234:5678": "1234 5678 5678",
		"nobody":    "65534 65534 65534",
		"nobody:8":  "65534 8 8",
	} {
		r, o := g.run(t, client.Command{Args: []string{"sh", "-c", id}, User: user, Dir: "/"})
		if r.ExitCode != 0 || strings.TrimSpace(o.stdout.String()) != want {
			t.Errorf("%s: got %q (exit code %d, %v, %s), want %q", user, &o.stdout, r.ExitCode, r.Error, &o.stderr, want)
		}
	}
}

func TestExecLimits(t *testing.T) {
	testkit.RequireRoot(t)
	g := start(t, agent.Config{})
	r, o := g.run(t, client.Command{
		Args:   []string{"sh", "-c", "ulimit -Sn; ulimit -Hn; ulimit -c; ulimit -f; sh -c 'ulimit -Sn'"},
		Limits: []client.ResourceLimit{{Name: "nofile", Soft: 100, Hard: 200}, {Name: "core", Soft: 0, Hard: 0}, {Name: "fsize", Soft: client.Unlimited, Hard: client.Unlimited}},
	})
	if r.ExitCode != 0 || o.stdout.String() != "100\n200\n0\nunlimited\n100\n" {
		t.Errorf("got %+v (%v), limits %q", r, r.Error, &o.stdout)
	}
	for range 20 {
		if r, o := g.run(t, client.Command{Args: []string{"sh", "-c", "ulimit -n"}, Limits: []client.ResourceLimit{{Name: "nofile", Soft: 64, Hard: 64}}}); r.ExitCode != 0 || o.stdout.String() != "64\n" {
			t.Fatalf("got %+v, %q", r, &o.stdout)
		}
	}
	for name, limit := range map[string]client.ResourceLimit{
		"no such":    {Name: "luck", Soft: 1, Hard: 1},
		"soft above": {Name: "nofile", Soft: 2, Hard: 1},
		"negative":   {Name: "nofile", Soft: -2, Hard: -2},
	} {
		_, err := g.Exec(context.Background(), client.Command{Args: []string{"true"}, Limits: []client.ResourceLimit{limit}})
		if !errors.Is(err, &client.Error{Code: proto.CodeInvalidRequest}) {
			t.Errorf("%s: error %v, want invalid_request", name, err)
		}
	}
}

func TestExecGroups(t *testing.T) {
	testkit.RequireRoot(t)
	g := start(t, agent.Config{})
	for user, want := range map[string]string{"nobody": "65534 12 8\n", "1234:5": "5 12 8\n", "": "0 12 8\n"} {
		r, o := g.run(t, client.Command{Args: []string{"id", "-G"}, User: user, Groups: []string{"12", "8"}, Dir: "/"})
		got := strings.Fields(o.stdout.String())
		if slices.Sort(got[1:]); r.ExitCode != 0 || strings.Join(got, " ")+"\n" != want {
			t.Errorf("user %q: got %+v, groups %q, want %q", user, r, got, want)
		}
	}
	if r, _ := g.run(t, client.Command{Args: []string{"id"}, Groups: []string{"no-such-group"}}); r.ExitCode != 126 || r.Error.Code != proto.CodeUserNotFound {
		t.Errorf("got %+v", r)
	}
}

// Where cgroups are missing the process group is killed, and the result says that
// this is all.
func TestTimeoutOfAProcessGroup(t *testing.T) {
	g := start(t, agent.Config{})
	r, _ := g.run(t, client.Command{Args: []string{"sh", "-c", `sleep 300 & echo $! >child; wait`}, Dir: g.dir, Timeout: time.Second})
	if !r.TimedOut || r.Containment != "process_group" {
		t.Errorf("got %+v", r)
	}
	eventually(t, "end of the child", func() bool { return !alive(t, filepath.Join(g.dir, "child")) })
}

// A command whose host is gone is killed.
func TestExecEndsWithItsContext(t *testing.T) {
	g := startContained(t)
	ctx, cancel := context.WithCancel(context.Background())
	pid := filepath.Join(g.dir, "pid")
	// What it writes comes behind the word that it has been started.
	out, w := io.Pipe()
	p, err := g.Start(ctx, client.Command{Args: []string{"sh", "-c", "setsid sleep 300 & echo $! >pid; echo; wait"}, Dir: g.dir, Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	_, err = p.Wait()
	var lost *client.ConnectionError
	if !errors.Is(err, context.Canceled) || !errors.As(err, &lost) || !lost.Started {
		t.Errorf("error %v, want a connection error with the context as its cause, started", err)
	}
	eventually(t, "end of the command", func() bool { return !alive(t, pid) })
}

// A protected agent's commands are not protected, from their first instruction on.
func TestCommandsAreNotProtected(t *testing.T) {
	testkit.RequireRoot(t)
	const file = "/proc/self/oom_score_adj"
	old, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// A score of its own is what counts; not everywhere may root lower it.
	score := "-1000\n"
	if agent.Protect() != nil {
		score = "500\n"
		if err := os.WriteFile(file, []byte(score), 0); err != nil {
			t.Fatal(err)
		}
	}
	defer os.WriteFile(file, old, 0)
	g := startContained(t)
	for range 20 {
		r, o := g.sh(t, `read -r a </proc/self/oom_score_adj; echo $a; sh -c 'cat /proc/self/oom_score_adj'`)
		if r.ExitCode != 0 || o.stdout.String() != "0\n0\n" {
			t.Fatalf("got %+v, score %q, want 0", r, &o.stdout)
		}
	}
	if r, _ := g.run(t, client.Command{Args: []string{"sh", "-c", "kill -9 $$"}}); r.Signal != 9 {
		t.Errorf("got %+v, want signal 9", r)
	}
	if r, _ := g.run(t, client.Command{Args: []string{"/bin"}}); r.ExitCode != 126 {
		t.Errorf("got %+v, want 126", r)
	}
	if b, _ := os.ReadFile(file); string(b) != score {
		t.Errorf("the agent's own score is %s", b)
	}
}

// The kernel's kill is told from any other.
func TestOutOfMemoryIsReported(t *testing.T) {
	inLab(t, "needs the memory controller in cgroup v2")
	g := startContained(t)
	if err := os.WriteFile(filepath.Join(g.cgroup, "memory.max"), []byte("33554432"), 0); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(filepath.Join(g.cgroup, "memory.swap.max"), []byte("0"), 0)
	r, _ := g.run(t, client.Command{Args: []string{"sh", "-c", `x=x; while :; do x=$x$x; done`}})
	// The kernel counts in batches, and so can go a little above the limit.
	if !r.OOMKilled || r.Signal != 9 || r.PeakMemoryBytes < 16<<20 || r.PeakMemoryBytes > 40<<20 {
		t.Errorf("got %+v, want an out-of-memory kill at 32 MiB", r)
	}
	if r, o := g.sh(t, "echo ok"); r.OOMKilled || o.stdout.String() != "ok\n" {
		t.Errorf("afterwards: %+v, %q", r, &o.stdout)
	}
}

func TestTooManyOperations(t *testing.T) {
	g := start(t, agent.Config{MaxOperations: 1})
	p, err := g.Start(context.Background(), client.Command{Args: []string{"cat"}, Stdin: strings.NewReader("")})
	if err != nil {
		t.Fatal(err)
	}
	p.Wait()
	held, err := g.dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	eventually(t, "refusal", func() bool {
		_, err := g.Ping(context.Background())
		var e *client.Error
		return errors.As(err, &e) && e.Code == proto.CodeTooManyOperations && e.Retryable
	})
}

// No cgroup is left when a command has ended.
func TestCgroupsAreRemoved(t *testing.T) {
	g := startContained(t)
	killAtEnd(t, filepath.Join(g.dir, "pid"))
	g.sh(t, "sleep 300 & echo $! >pid")
	for range 3 {
		g.sh(t, "true")
	}
	groups, _ := filepath.Glob(filepath.Join(g.cgroup, "exec-*"))
	if len(groups) != 1 {
		t.Errorf("groups %q, want the one of the background process", groups)
	}
	b, _ := os.ReadFile(filepath.Join(g.dir, "pid"))
	syscall.Kill(atoi(string(b)), syscall.SIGKILL)
	eventually(t, "removal of the last group", func() bool {
		g.sh(t, "true")
		groups, _ := filepath.Glob(filepath.Join(g.cgroup, "exec-*"))
		return len(groups) == 0
	})
}

func atoi(s string) int {
	var n int
	fmt.Sscan(s, &n)
	return n
}

// An operation id that is known is refused where there is nothing to attach to.
func TestOperationIDs(t *testing.T) {
	g := start(t, agent.Config{})
	exec := func() *proto.Error {
		_, failure := talk(t, g, request(proto.Request{Op: "exec", OperationID: "plain", Params: []byte(`{"args":["true"],"stdout":"discard","stderr":"discard"}`)}))
		return failure
	}
	exec()
	if failure := exec(); failure == nil || failure.Code != proto.CodeOperationExists {
		t.Errorf("error %v, want operation_exists", failure)
	}
	// What never started may be tried again.
	for range 2 {
		if r, _ := g.run(t, client.Command{Args: []string{"/no/such/program"}, OperationID: "deploy-2"}); r.ExitCode != 127 {
			t.Errorf("got %+v", r)
		}
	}
}

// A command whose input cannot be read, or is cut by its context, does not take
// what there was for everything, and does not wait for the rest.
func TestExecInputIsCut(t *testing.T) {
	g := start(t, agent.Config{})
	for name, tt := range map[string]struct {
		end  func(cancel func()) io.Reader
		want error
	}{
		"reader fails": {func(func()) io.Reader { return broken{} }, io.ErrClosedPipe},
		"context ends": {func(cancel func()) io.Reader { return endsAfter{cancel} }, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			_, err := g.Exec(ctx, client.Command{Args: []string{"sh", "-c", "cat && touch complete"}, Dir: g.dir,
				Stdin: io.MultiReader(strings.NewReader("half"), tt.end(cancel))})
			if !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
		})
	}
	eventually(t, "no command", func() bool {
		info, err := g.Ping(context.Background())
		return err == nil && info.Operations == 0
	})
	if _, err := os.Stat(filepath.Join(g.dir, "complete")); err == nil {
		t.Error("a command took half of its input for everything")
	}
}
