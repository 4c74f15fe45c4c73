package agent_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/testkit"
)

// initSocket, in the environment, makes this program an agent that is PID 1 of
// its PID namespace.
const initSocket = "FORKVM_TEST_INIT_SOCKET"

func TestMain(m *testing.M) {
	if path := os.Getenv(initSocket); path != "" {
		serveAsInit(path)
		return
	}
	testkit.Main(m)
}

// guest is an agent on this machine, reached over a Unix socket.
type guest struct {
	*client.Client
	dir    string // for the test's files
	dial   func(context.Context) (net.Conn, error)
	agent  *agent.Agent
	cgroup string // of the agent, or empty
}

// with returns another client of the same agent.
func (g *guest) with(cfg client.Config) *client.Client {
	cfg.Dial = g.dial
	return client.New(cfg)
}

func dialer(path string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
}

// start runs an agent until the test ends and checks that nothing is left.
func start(t *testing.T, cfg agent.Config) *guest {
	t.Helper()
	testkit.NoLeaks(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "agent.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = func(m string) { t.Log("agent: " + m) }
	a, err := agent.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- a.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != context.Canceled {
			t.Errorf("serve: %v", err)
		}
		a.Close()
	})
	return &guest{Client: client.New(client.Config{Dial: dialer(path)}), dir: dir, dial: dialer(path), agent: a, cgroup: cfg.Cgroup}
}

// startContained runs an agent that has cgroups, or skips the test.
func startContained(t *testing.T) *guest {
	t.Helper()
	dir := testCgroup(t)
	g := start(t, agent.Config{Cgroup: dir})
	r, _ := g.run(t, client.Command{Args: []string{"true"}})
	if r.Containment != "cgroup" {
		testkit.Require(t, "cgroup", "needs a writable cgroup v2 hierarchy: run it as root, or in the lab")
	}
	return g
}

// testCgroup returns a cgroup directory for one test, removed with it.
func testCgroup(t *testing.T) string {
	t.Helper()
	testkit.RequireRoot(t)
	dir, err := agent.FindCgroup()
	if err != nil {
		testkit.Require(t, "cgroup", "needs cgroup v2: "+err.Error())
	}
	dir += "-test-" + strconv.Itoa(os.Getpid())
	t.Cleanup(func() {
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			if e.IsDir() {
				os.WriteFile(filepath.Join(dir, e.Name(), "cgroup.kill"), []byte("1"), 0)
				eventually(t, "removal of "+e.Name(), func() bool { return syscall.Rmdir(filepath.Join(dir, e.Name())) == nil })
			}
		}
		syscall.Rmdir(dir)
	})
	return dir
}

// run runs a command that the test expects to be run, and returns its output.
func (g *guest) run(t testing.TB, cmd client.Command) (client.Result, *output) {
	t.Helper()
	o := &output{}
	if cmd.Stdout == nil {
		cmd.Stdout = &o.stdout
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &o.stderr
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	r, err := g.Exec(ctx, cmd)
	if err != nil {
		t.Fatalf("exec %.100q: %v", cmd.Args, err)
	}
	return r, o
}

// sh runs a shell script.
func (g *guest) sh(t testing.TB, script string) (client.Result, *output) {
	t.Helper()
	return g.run(t, client.Command{Args: []string{"sh", "-c", script}, Dir: g.dir})
}

type output struct{ stdout, stderr bytes.Buffer }

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Errorf("%s: not within 20 s", what)
}

// killAtEnd ends the background processes whose pids a script wrote to files.
func killAtEnd(t *testing.T, files ...string) {
	t.Cleanup(func() {
		for _, f := range files {
			b, _ := os.ReadFile(f)
			for _, pid := range strings.Fields(string(b)) {
				if n, err := strconv.Atoi(pid); err == nil && n > 1 {
					syscall.Kill(n, syscall.SIGKILL)
				}
			}
		}
	})
}

// alive tells whether the process whose pid is in a file exists and is no
// zombie.
func alive(t testing.TB, file string) bool {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	stat, err := os.ReadFile("/proc/" + strings.TrimSpace(string(b)) + "/stat")
	if err != nil {
		return false
	}
	_, tail, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(tail, "Z")
}

// serveAsInit is the other process of startInit.
func serveAsInit(path string) {
	l, err := net.Listen("unix", path)
	if err == nil {
		var a *agent.Agent
		if a, err = agent.New(agent.Config{Init: true}); err == nil {
			err = a.Serve(context.Background(), l)
		}
	}
	os.Stderr.WriteString(err.Error() + "\n")
	os.Exit(1)
}

// startInit runs an agent that is PID 1 of a PID namespace, with its own /proc
// at g.dir/proc.
func startInit(t *testing.T) *guest {
	t.Helper()
	testkit.RequireRoot(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "agent.sock")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), initSocket+"="+path)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	if err := cmd.Start(); err != nil {
		testkit.Require(t, "namespaces", "needs PID namespaces: "+err.Error())
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	g := &guest{Client: client.New(client.Config{Dial: dialer(path)}), dir: dir, dial: dialer(path)}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := g.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	if r, o := g.sh(t, "mount --make-rprivate / && mount -t proc proc /proc"); r.ExitCode != 0 {
		t.Fatalf("mount /proc: %s", &o.stderr)
	}
	return g
}
