package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/store"
)

// These tests run the program as a user does, and look at what is left of it.
// The test binary is the program: started again with actsAsProgram set it is
// forkvm, and so are the VM processes that it starts.
const actsAsProgram = "FORKVM_TEST_AS_PROGRAM"

const (
	// patience is for what takes its time in an emulated machine on a busy host.
	patience = 15 * time.Minute
	// slowly is the flag for calls that wait for a guest there.
	slowly = "--ready-timeout=10m"
	// promptly is how soon a bad input is refused. On hardware it is far below
	// two seconds; the machines that tests run in are up to ten times slower.
	promptly = 20 * time.Second
	// guestMemory is what the test guests have.
	guestMemory = "192M"
)

func TestMain(m *testing.M) {
	if os.Getenv(actsAsProgram) != "" {
		main()
		return
	}
	if files, world := os.LookupEnv(actsAsWorld); world {
		if err := runWorld(files); err != nil {
			fmt.Fprintln(os.Stderr, "world:", err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if shared.dir != "" {
		os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

// shared is a data directory with images and snapshots, made when the first
// test needs them; of each snapshot what came of making it.
var shared struct {
	sync.Mutex
	dir       string
	images    map[string]bool
	snapshots map[string]error
}

// host is one machine as a user of forkvm sees it.
type host struct {
	t         *testing.T
	data, run string
}

// newHost is a machine with its own VMs. It shares images and snapshots with
// other tests unless data is given. When the test ends nothing may be left.
func newHost(t *testing.T, data string) *host {
	t.Helper()
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	if data == "" {
		data = sharedDir(t)
	}
	// Sockets below it need short paths.
	run, err := os.MkdirTemp("/tmp", "fv")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, data: data, run: run}
	t.Cleanup(h.close)
	return h
}

func sharedDir(t *testing.T) string {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.dir == "" {
		dir, err := os.MkdirTemp("/var/tmp", "forkvm-cli-")
		if err != nil {
			t.Fatal(err)
		}
		shared.dir, shared.images, shared.snapshots = dir, map[string]bool{}, map[string]error{}
	}
	return shared.dir
}

// close ends what the test left running and looks for what is left then.
func (h *host) close() {
	if ids := strings.Fields(h.forkvm("ls", "-aq").stdout); len(ids) > 0 {
		if r := h.forkvm(append([]string{"rm", "-f"}, ids...)...); r.code != 0 {
			h.t.Errorf("clean up: %v", r)
		}
	}
	h.thaw()
	for _, dir := range []string{filepath.Join(h.run, "vms"), filepath.Join(h.run, "names")} {
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			h.t.Errorf("left in %s: %s", dir, e.Name())
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			h.t.Error(err)
		}
	}
	os.RemoveAll(h.run)
}

// thaw removes the snapshots that the test has made and not removed, of those that tests share: the next one may want their names.
func (h *host) thaw() {
	if h.data != shared.dir {
		return
	}
	shared.Lock()
	defer shared.Unlock()
	for _, name := range strings.Fields(h.forkvm("snapshot", "ls", "-q").stdout) {
		if _, forAll := shared.snapshots[name]; forAll {
			continue
		}
		if r := h.forkvm("snapshot", "rm", name); r.code != 0 {
			h.t.Errorf("clean up: %v", r)
		}
	}
}

// result is what one call of the program came to.
type result struct {
	args           []string
	stdout, stderr string
	code           int
	took           time.Duration
}

func (r result) String() string {
	return fmt.Sprintf("forkvm %s: exit code %d after %.1f s\nstdout: %q\nstderr: %q",
		strings.Join(r.args, " "), r.code, r.took.Seconds(), r.stdout, r.stderr)
}

// command is a call of the program that has not begun.
func (h *host) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), actsAsProgram+"=1", "FORKVM_DATA_DIR="+h.data, "FORKVM_RUN_DIR="+h.run, "FORKVM_CONFIG=/dev/null")
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

func (h *host) forkvm(args ...string) result { return h.typing("", args...) }

// typing is forkvm with standard input.
func (h *host) typing(stdin string, args ...string) result {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := h.command(ctx, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	begun := time.Now()
	err := cmd.Run()
	r := result{args, stdout.String(), stderr.String(), cmd.ProcessState.ExitCode(), time.Since(begun)}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		h.t.Fatalf("%v\n%v", r, errors.Join(err, ctx.Err()))
	}
	return r
}

// must is forkvm for a call that has to succeed. It returns standard output.
func (h *host) must(args ...string) string {
	h.t.Helper()
	r := h.forkvm(args...)
	if r.code != 0 {
		h.t.Fatal(r)
	}
	return r.stdout
}

// refused checks that a call fails promptly, with this code of an error. Verbs
// that take several VMs have it in their output, the others beside it.
func (h *host) refused(code string, args ...string) {
	h.t.Helper()
	r := h.forkvm(append(args, "-o", "jsonl")...)
	if want := fmt.Sprintf(`"code":%q`, code); r.code == 0 || !strings.Contains(r.stdout+r.stderr, want) {
		h.t.Errorf("want error code %s: %v", code, r)
	}
	if r.took > promptly {
		h.t.Errorf("took %v to refuse: %v", r.took, r)
	}
}

// view is what inspect says of a VM.
type view struct {
	ID, Name, State, Directory string
	Snapshot, Generation       string
	MachineID                  string `json:"machine_id"`
	PID                        int
	CPUs                       int
	DiskError                  *struct{ Code string } `json:"disk_error"`
}

func (h *host) inspect(vm string) view {
	h.t.Helper()
	var views []view
	if err := json.Unmarshal([]byte(h.must("inspect", vm)), &views); err != nil || len(views) != 1 {
		h.t.Fatalf("inspect %s: %v, %d views", vm, err, len(views))
	}
	return views[0]
}

// sh runs a shell command in a VM and returns what it prints.
func (h *host) sh(vm, script string) string {
	h.t.Helper()
	return strings.TrimSpace(h.must("exec", vm, "--", "sh", "-c", script))
}

// image makes sure that the data directory has one of the test images.
func (h *host) image(name string) string {
	h.t.Helper()
	if h.data == shared.dir {
		shared.Lock()
		defer shared.Unlock()
		if shared.images[name] {
			return name
		}
		shared.images[name] = true
	}
	st, err := store.Open(h.data)
	if err != nil {
		h.t.Fatal(err)
	}
	defer st.Close()
	source := filepath.Join(testkit.RequireGuest(h.t), name)
	if err := st.PublishImage(name, func(dir string) error { return os.CopyFS(dir, os.DirFS(source)) }); err != nil {
		h.t.Fatal(err)
	}
	return name
}

// base is a snapshot of a guest that has just booted from a disk.
func (h *host) base() string {
	h.t.Helper()
	return h.freeze("base", []string{"create", slowly, "--name", "base", "--memory", guestMemory, h.image("disk")})
}

// freeze returns the name of a snapshot of the VM that these calls of the program make. The first test makes it.
func (h *host) freeze(name string, calls ...[]string) string {
	h.t.Helper()
	shared.Lock()
	defer shared.Unlock()
	err, made := shared.snapshots[name]
	if !made {
		for _, args := range append(calls, []string{"snapshot", name, name, "--task", "test"}, []string{"rm", "-f", name}) {
			if r := h.forkvm(args...); r.code != 0 {
				err = fmt.Errorf("make a snapshot to start from: %v", r)
				break
			}
		}
		shared.snapshots[name] = err
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return name
}

// start makes a VM from the base snapshot.
func (h *host) start(name string) view {
	h.t.Helper()
	h.must("create", slowly, "--snapshot", h.base(), "--name", name)
	return h.inspect(name)
}

// eventually waits for something that happens by itself.
func (h *host) eventually(what string, happened func() bool) {
	h.t.Helper()
	deadline := time.Now().Add(promptly)
	for !happened() {
		if time.Now().After(deadline) {
			h.t.Fatalf("not within %v: %s", promptly, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
