package agent_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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

// Case B6: exec returns when the main process has ended, whoever holds its
// streams, and has all of its output.
func TestB6ExecReturnsWhenTheMainProcessEnds(t *testing.T) {
	for name, begin := range map[string]func(*testing.T) *guest{
		"cgroup":        startContained,
		"process group": func(t *testing.T) *guest { return start(t, agent.Config{}) },
	} {
		t.Run(name, func(t *testing.T) { testB6(t, begin(t)) })
	}
}

func testB6(t *testing.T, g *guest) {
	pids := []string{filepath.Join(g.dir, "1"), filepath.Join(g.dir, "2"), filepath.Join(g.dir, "3"), filepath.Join(g.dir, "6")}
	killAtEnd(t, pids...)
	quick := func(t *testing.T, script, want string) {
		t.Helper()
		begin := time.Now()
		r, o := g.sh(t, script)
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("took %v", took)
		}
		if r.ExitCode != 0 || !strings.HasPrefix(o.stdout.String(), want) {
			t.Errorf("exit code %d, output %q, want %q", r.ExitCode, &o.stdout, want)
		}
	}
	t.Run("1 sleeping child", func(t *testing.T) { quick(t, `sleep 300 & echo $! >1; echo hi`, "hi\n") })
	t.Run("2 writing child", func(t *testing.T) {
		r, o := g.sh(t, `(while :; do echo x; sleep 0.02; done) & echo $! >2; sleep 0.1; echo done`)
		if r.ExitCode != 0 || !strings.Contains(o.stdout.String(), "done\n") {
			t.Errorf("exit code %d, output %q", r.ExitCode, &o.stdout)
		}
	})
	t.Run("3 nohup", func(t *testing.T) { quick(t, `nohup sleep 300 & echo $! >3`, "") })
	t.Run("4 stdin held open", func(t *testing.T) {
		r, w := io.Pipe()
		defer w.Close()
		result, _ := g.run(t, client.Command{Args: []string{"true"}, Stdin: r})
		if result.ExitCode != 0 {
			t.Errorf("exit code %d", result.ExitCode)
		}
	})
	t.Run("5 stdin held open and a timeout", func(t *testing.T) {
		r, w := io.Pipe()
		defer w.Close()
		result, _ := g.run(t, client.Command{Args: []string{"sleep", "60"}, Stdin: r, Timeout: 300 * time.Millisecond})
		if !result.TimedOut || result.ExitCode != 124 || result.Signal != 9 || result.DurationMS < 300 || result.DurationMS > 20_000 {
			t.Errorf("got %+v, want a timeout after 300 ms", result)
		}
	})
	t.Run("6 all bytes", func(t *testing.T) {
		r, o := g.sh(t, `sleep 300 & echo $! >6; head -c 1000000 /dev/zero`)
		if r.ExitCode != 0 || o.stdout.Len() != 1_000_000 {
			t.Errorf("exit code %d, %d bytes, want 1000000", r.ExitCode, o.stdout.Len())
		}
	})
	t.Run("7 stdin closed", func(t *testing.T) {
		r, o := g.run(t, client.Command{Args: []string{"cat"}, Stdin: strings.NewReader("last words")})
		if r.ExitCode != 0 || o.stdout.String() != "last words" {
			t.Errorf("exit code %d, output %q", r.ExitCode, &o.stdout)
		}
	})
	// The writing child of 2 has met its pipe often by now.
	time.Sleep(100 * time.Millisecond)
	for _, f := range pids {
		if !alive(t, f) {
			t.Errorf("background process %s is gone", filepath.Base(f))
		}
	}
}

// Case B7: a timeout reaches every descendant.
func TestB7TimeoutKillsAllDescendants(t *testing.T) {
	g := startContained(t)
	other, err := g.Start(context.Background(), client.Command{Args: []string{"sleep", "300"}})
	if err != nil {
		t.Fatal(err)
	}
	beat := func(name string) string {
		return fmt.Sprintf(`sh -c 'echo $$ >%s.pid; while :; do echo . >>%s.beat; sleep 0.05; done'`, name, name)
	}
	stubborn := strings.Replace(beat("ignores"), "sh -c '", `sh -c 'trap "" TERM HUP INT; `, 1)
	script := strings.Join([]string{
		beat("plain") + " &",
		stubborn + " &",
		"setsid " + beat("session") + " &",
		"(setsid " + beat("daemon") + " >/dev/null 2>&1 </dev/null &) &",
		"unshare --pid --fork " + strings.ReplaceAll(beat("namespace"), "echo $$ >namespace.pid", ":") + " &",
		"echo partial; echo output >&2",
		"wait; sleep 300",
	}, "\n")
	r, o := g.run(t, client.Command{Args: []string{"sh", "-c", script}, Dir: g.dir, Timeout: 1500 * time.Millisecond})
	if !r.TimedOut || r.ExitCode != 124 || o.stdout.String() != "partial\n" || o.stderr.String() != "output\n" {
		t.Errorf("got %+v, output %q and %q", r, &o.stdout, &o.stderr)
	}
	names := []string{"plain", "ignores", "session", "daemon", "namespace"}
	size := func(name string) int64 {
		info, err := os.Stat(filepath.Join(g.dir, name+".beat"))
		if err != nil {
			t.Fatalf("%s never ran: %v", name, err)
		}
		return info.Size()
	}
	before := map[string]int64{}
	for _, n := range names {
		before[n] = size(n)
	}
	time.Sleep(300 * time.Millisecond)
	for _, n := range names {
		if size(n) != before[n] {
			t.Errorf("%s goes on", n)
		}
		if n != "namespace" && alive(t, filepath.Join(g.dir, n+".pid")) {
			t.Errorf("%s is alive", n)
		}
	}
	if err := other.Signal(int(syscall.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if r, err := other.Wait(); err != nil || r.Signal != int(syscall.SIGTERM) {
		t.Errorf("the other command: %+v, %v; want signal 15 from us", r, err)
	}
}

// Case B7 where cgroups are missing: the process group is killed, and the
// result says that this is all.
func TestB7ProcessGroup(t *testing.T) {
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
	p, err := g.Start(ctx, client.Command{Args: []string{"sh", "-c", "setsid sleep 300 & echo $! >pid.tmp; mv pid.tmp pid; wait"}, Dir: g.dir})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "start", func() bool { _, err := os.Stat(pid); return err == nil })
	cancel()
	_, err = p.Wait()
	var lost *client.ConnectionError
	if !errors.Is(err, context.Canceled) || !errors.As(err, &lost) || !lost.Started {
		t.Errorf("error %v, want a connection error with the context as its cause, started", err)
	}
	eventually(t, "end of the command", func() bool { return !alive(t, pid) })
}

// Case B8, scaled: PID 1 reaps orphans and loses no exit code to that.
func TestB8ReapingAndExitCodes(t *testing.T) {
	g := startInit(t)
	const workers, rounds, orphans = 8, 32, 60
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for range orphans {
			g.sh(t, "sleep 0.05 & sleep 0.01 & exit 0")
		}
	}()
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range rounds {
				n := (w*rounds + i) % 256
				if r, _ := g.sh(t, fmt.Sprintf("exit %d", n)); r.ExitCode != n || r.Signal != 0 {
					t.Errorf("exit %d gave %+v", n, r)
				}
				if sig := []int{1, 2, 9, 15}[i%4]; i%8 == 0 {
					if r, _ := g.sh(t, fmt.Sprintf("kill -%d $$; sleep 9", sig)); r.Signal != sig || r.ExitCode != 128+sig {
						t.Errorf("signal %d gave %+v", sig, r)
					}
				}
			}
		}()
	}
	wg.Wait()
	eventually(t, "no zombies", func() bool {
		_, o := g.sh(t, `cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '; ls -d /proc/[0-9]* | wc -l`)
		var zombies, processes int
		fmt.Sscan(o.stdout.String(), &zombies, &processes)
		// The agent and the script that counts, with its pipes.
		return zombies == 0 && processes > 0 && processes <= 6
	})
}

// Case B9: commands that are stuck, or whose output nobody reads, hold up
// nobody else.
func TestB9StuckCommandsDoNotHoldUpOthers(t *testing.T) {
	g := start(t, agent.Config{})
	ctx, cancel := context.WithCancel(context.Background())
	var stuck []*client.Process
	defer func() {
		cancel()
		for _, p := range stuck {
			p.Wait()
		}
	}()
	hold := func(cmd client.Command) {
		t.Helper()
		p, err := g.Start(ctx, cmd)
		if err != nil {
			t.Fatal(err)
		}
		stuck = append(stuck, p)
	}
	if err := syscall.Mkfifo(filepath.Join(g.dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	hold(client.Command{Args: []string{"cat", "fifo"}, Dir: g.dir})
	unread, release := newUnread()
	defer release()
	hold(client.Command{Args: []string{"yes"}, Stdout: unread})
	for range 200 {
		hold(client.Command{Args: []string{"sleep", "300"}})
	}
	begin := time.Now()
	for range 20 {
		if r, o := g.sh(t, "echo ok"); r.ExitCode != 0 || o.stdout.String() != "ok\n" {
			t.Fatalf("got %+v, %q", r, &o.stdout)
		}
		if _, err := g.Ping(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("20 rounds took %v", took)
	}
	if n := unread.count(); n > 1<<20 {
		t.Errorf("%d bytes on their way to a reader that reads none", n)
	}
	// Side by side, not one after the other.
	begin = time.Now()
	var wg sync.WaitGroup
	for range 50 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			g.run(t, client.Command{Args: []string{"sleep", "1"}})
		}()
	}
	wg.Wait()
	if took := time.Since(begin); took > 25*time.Second {
		t.Errorf("50 times sleep 1 side by side took %v", took)
	}
}

// unread is a Writer that blocks from its first Write until it is released.
type unread struct {
	mu      sync.Mutex
	n       int
	release chan struct{}
}

func newUnread() (*unread, func()) {
	u := &unread{release: make(chan struct{})}
	return u, func() { close(u.release) }
}

func (u *unread) Write(p []byte) (int, error) {
	u.mu.Lock()
	u.n += len(p)
	u.mu.Unlock()
	<-u.release
	return len(p), nil
}

func (u *unread) count() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.n
}

// Case B10: every byte, on its own stream.
func TestB10Fidelity(t *testing.T) {
	g := start(t, agent.Config{})
	t.Run("tail before exit", func(t *testing.T) {
		for range 100 {
			if _, o := g.run(t, client.Command{Args: []string{"head", "-c", "65537", "/dev/zero"}}); o.stdout.Len() != 65537 {
				t.Fatalf("%d bytes of 65537", o.stdout.Len())
			}
		}
	})
	t.Run("two big streams", func(t *testing.T) {
		const size = 24 << 20
		sums := map[string][32]byte{}
		for _, name := range []string{"a", "b"} {
			b := make([]byte, size)
			rand.Read(b)
			sums[name] = sha256.Sum256(b)
			if err := os.WriteFile(filepath.Join(g.dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		stdout, stderr := sha256.New(), sha256.New()
		r, _ := g.run(t, client.Command{Args: []string{"sh", "-c", "cat b >&2 & cat a; wait"}, Dir: g.dir, Stdout: stdout, Stderr: stderr})
		if [32]byte(stdout.Sum(nil)) != sums["a"] || [32]byte(stderr.Sum(nil)) != sums["b"] {
			t.Error("streams differ from what was written")
		}
		if r.StdoutBytes != size || r.StderrBytes != size {
			t.Errorf("counted %d and %d bytes, want %d", r.StdoutBytes, r.StderrBytes, size)
		}
	})
	t.Run("200 MiB through each stream", func(t *testing.T) {
		const size = 200 << 20
		want, stdout, stderr := sha256.New(), sha256.New(), sha256.New()
		input := io.TeeReader(io.LimitReader(mathrand.NewChaCha8([32]byte{}), size), want)
		r, _ := g.run(t, client.Command{Args: []string{"tee", "/dev/stderr"}, Stdin: input, Stdout: stdout, Stderr: stderr})
		if sum := string(want.Sum(nil)); string(stdout.Sum(nil)) != sum || string(stderr.Sum(nil)) != sum {
			t.Error("streams differ from what was sent")
		}
		if r.StdoutBytes != size || r.StderrBytes != size {
			t.Errorf("counted %d and %d bytes, want %d", r.StdoutBytes, r.StderrBytes, size)
		}
	})
	t.Run("text and bytes", func(t *testing.T) {
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		for name, input := range map[string]string{"three-byte characters": strings.Repeat("€", 50<<10), "all bytes": string(all)} {
			_, o := g.run(t, client.Command{Args: []string{"cat"}, Stdin: strings.NewReader(input)})
			if o.stdout.String() != input {
				t.Errorf("%s: %d bytes came back, different from the %d sent", name, o.stdout.Len(), len(input))
			}
		}
		_, o := g.sh(t, `printf '\342'; sleep 0.05; printf '\202'; sleep 0.05; printf '\254'`)
		if o.stdout.String() != "€" {
			t.Errorf("a character in three writes came as %q", &o.stdout)
		}
	})
	t.Run("limits", func(t *testing.T) {
		const limit = 100_000
		for _, size := range []int64{limit - 1, limit, limit + 1, 3 * limit} {
			cmd := client.Command{Args: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}, StdoutLimit: limit}
			r, o := g.run(t, cmd)
			want := min(size, limit)
			if r.ExitCode != 0 || int64(o.stdout.Len()) != want || r.StdoutBytes != want || r.StdoutDropped != size-want || r.StdoutTruncated != (size > limit) {
				t.Errorf("%d bytes: got %d, %+v", size, o.stdout.Len(), r)
			}
		}
	})
	t.Run("standard input", func(t *testing.T) {
		b := make([]byte, 8<<20)
		rand.Read(b)
		_, o := g.run(t, client.Command{Args: []string{"cat"}, Stdin: strings.NewReader(string(b))})
		if o.stdout.String() != string(b) {
			t.Error("8 MiB through cat came back different")
		}
	})
	t.Run("input that is not read", func(t *testing.T) {
		r, _ := g.run(t, client.Command{Args: []string{"sh", "-c", "exec <&-; sleep 0.2"}, Stdin: endless{}})
		if r.ExitCode != 0 {
			t.Errorf("got %+v", r)
		}
	})
	t.Run("writer that fails", func(t *testing.T) {
		r, err := g.Exec(context.Background(), client.Command{Args: []string{"head", "-c", "1000000", "/dev/zero"}, Stdout: failing{}})
		if !errors.Is(err, io.ErrShortBuffer) || r.ExitCode != 0 {
			t.Errorf("got %+v, %v, want the Writer's error and the result", r, err)
		}
	})
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortBuffer }

// Case B11, the arguments: what Linux takes works, more is a typed outcome.
func TestB11Arguments(t *testing.T) {
	g := start(t, agent.Config{})
	env := make([]string, 30)
	for i := range env {
		env[i] = fmt.Sprintf("V%d=%s", i, strings.Repeat("x", 100_000))
	}
	tests := []struct {
		name string
		cmd  client.Command
		ok   bool
	}{
		{"131,071 bytes", client.Command{Args: []string{"true", strings.Repeat("x", 131_071)}}, true},
		{"131,072 bytes", client.Command{Args: []string{"true", strings.Repeat("x", 131_072)}}, false},
		{"1 MiB", client.Command{Args: []string{"true", strings.Repeat("x", 1<<20)}}, false},
		{"3 MB of environment", client.Command{Args: []string{"true"}, Env: env}, false},
		{"0.9 MB of environment", client.Command{Args: []string{"true"}, Env: env[:9]}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, _ := g.run(t, tt.cmd)
			if tt.ok && r.ExitCode != 0 {
				t.Errorf("got %+v (%v)", r, r.Error)
			}
			if !tt.ok && (r.ExitCode != 126 || r.Error == nil || r.Error.Code != proto.CodeArgumentTooLong) {
				t.Errorf("got %+v (%v), want 126 with argument_too_long", r, r.Error)
			}
		})
	}
}

// Case E7, as far as it shows without filling the memory: a protected agent's
// commands are not protected, from their first instruction on.
func TestE7CommandsAreNotProtected(t *testing.T) {
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

// Case E7: the kernel's kill is told from any other.
func TestE7OutOfMemoryIsReported(t *testing.T) {
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
