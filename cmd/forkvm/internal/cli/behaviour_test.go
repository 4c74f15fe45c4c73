package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/vmm"
)

func TestFlagsReachTheNode(t *testing.T) {
	s := newSession(t)
	for _, line := range []string{
		"create debian",
		"create -m 6G --cpus 4 --mtu 9000 --name web --time frozen --ready-timeout 5s --kernel-args debug debian",
		"create --snapshot task-1 --name again --time frozen",
		"restore task-1 -n 1 --headroom 64M",
		"fork alpha --headroom 0",
		"restore task-1 --allow example.org:443",
		"run --memory 1.5G debian --cpus 3 -- uname",
	} {
		if _, stderr, code := s.run(strings.Fields(line)...); code != 0 {
			t.Fatalf("%s: exit code %d: %s", line, code, stderr)
		}
	}
	const patience = node.DefaultReadyTimeout
	want := []node.Options{
		{Time: machine.TimeHost, ReadyTimeout: patience, CPUs: 1, MemoryBytes: 512 << 20, NetworkMTU: 1500},
		{Name: "web", Time: machine.TimeFrozen, ReadyTimeout: 5 * time.Second, CPUs: 4, MemoryBytes: 6 << 30, CommandLine: "debug", NetworkMTU: 9000},
		{Name: "again", Time: machine.TimeFrozen, ReadyTimeout: patience},
		{Time: machine.TimeHost, ReadyTimeout: patience, Headroom: 64 << 20},
		{Time: machine.TimeHost, ReadyTimeout: patience, Headroom: machine.Unlimited},
		{Time: machine.TimeHost, ReadyTimeout: patience, Network: &policy.Policy{Mode: policy.Allowlist, Allow: []string{"example.org:443"}}},
		{Attached: true, Time: machine.TimeHost, ReadyTimeout: patience, CPUs: 3, MemoryBytes: 3 << 29, NetworkMTU: 1500},
	}
	if !reflect.DeepEqual(s.node.made, want) {
		t.Errorf("got %+v\nwant %+v", s.node.made, want)
	}
}

func TestCountMakesThatMany(t *testing.T) {
	s := newSession(t)
	stdout, stderr, code := s.run("restore", "task-1", "--count", "3")
	if code != 0 || len(strings.Fields(stdout)) != 3 {
		t.Errorf("exit code %d, ids %q, %s", code, stdout, stderr)
	}
}

func TestCommandReachesTheGuest(t *testing.T) {
	s := newSession(t)
	s.stdin = "typed"
	s.getenv["TOKEN"] = "secret"
	line := "exec -i -e A=1 -e TOKEN -e MISSING -e B= -w /srv -u 7:8 --timeout 90s alpha -- cat -x -- y"
	stdout, stderr, code := s.run(strings.Fields(line)...)
	if code != 0 || stdout != "typed" {
		t.Fatalf("exit code %d, stdout %q: %s", code, stdout, stderr)
	}
	got := s.node.vms[0].got
	if want := []string{"cat", "-x", "--", "y"}; !reflect.DeepEqual(got.Args, want) {
		t.Errorf("argv %q, want %q", got.Args, want)
	}
	if want := []string{"A=1", "TOKEN=secret", "B="}; !reflect.DeepEqual(got.Env, want) {
		t.Errorf("env %q, want %q", got.Env, want)
	}
	if got.Dir != "/srv" || got.User != "7:8" || got.Timeout != 90*time.Second {
		t.Errorf("got %+v", got)
	}
	s.run("exec", "alpha", "uname")
	if s.node.vms[0].got.Stdin != nil {
		t.Error("standard input was connected without -i")
	}
}

// However a foreground run ends, its VM does not stay.
func TestInterruptEndsTheForegroundVM(t *testing.T) {
	for _, c := range []struct {
		name    string
		line    string
		signal  syscall.Signal
		code    int
		removed bool
	}{
		{"command", "run --name x debian -- wait", syscall.SIGINT, 130, false},
		{"command, removed", "run --name x --rm debian -- wait", syscall.SIGTERM, 143, true},
		{"JSON", "run --name x --rm -o json debian -- wait", syscall.SIGTERM, 143, true},
		{"console", "run --name x --rm debian", syscall.SIGINT, 130, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSession(t)
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(50*time.Millisecond, func() { cancel(&Interrupted{c.signal}) })
			_, stderr, code := s.runContext(ctx, strings.Fields(c.line)...)
			if code != c.code {
				t.Errorf("exit code %d, want %d: %s", code, c.code, stderr)
			}
			vm := s.node.vms[len(s.node.vms)-1]
			if vm.record.Name != "x" || vm.status.State != node.Ended || vm.removed != c.removed {
				t.Errorf("vm %s is %s, removed: %v", vm.record.Name, vm.status.State, vm.removed)
			}
		})
	}
}

// A VM that ends under a command says more than the connection that broke.
func TestGuestEndsUnderACommand(t *testing.T) {
	s := newSession(t)
	vm := s.node.vms[0]
	vm.onExec = func() {
		vm.become(node.Status{State: node.Ended, Exit: &vmm.Exit{Reason: vmm.ReasonGuestPanic, Detail: "out of memory"}})
	}
	vm.execErr = &client.ConnectionError{Op: proto.OpExec, Started: true, Err: io.EOF}
	_, stderr, code := s.run("exec", "alpha", "make")
	if code != exitOurs || stderr != "forkvm: vm ended: guest_panic (out of memory)\n" {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	vm.become(node.Status{State: node.Running})
	vm.onExec = func() { vm.become(node.Status{State: node.Dead}) }
	if stdout, _, _ := s.run("exec", "-o", "jsonl", "alpha", "make"); !strings.Contains(stdout, `"code":"vm_process_gone"`) {
		t.Errorf("a process that died: %s", stdout)
	}
}

func TestResetUnderACommand(t *testing.T) {
	s := newSession(t)
	vm := s.node.vms[1]
	vm.become(node.Status{State: node.Running, Generation: vm.record.Identity.Generation})
	vm.onExec = func() {
		vm.become(node.Status{State: node.Running, Generation: "00000000-0000-0000-0000-000000000001"})
	}
	vm.execErr = &client.ConnectionError{Op: proto.OpExec, Started: true, Err: io.EOF}
	_, stderr, code := s.run("exec", "beta", "make")
	if want := "forkvm: vm beta was reset: exec in guest: connection lost while it ran: EOF\n"; code != exitOurs || stderr != want {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	vm.become(node.Status{State: node.Running, Generation: vm.record.Identity.Generation})
	if stdout, _, _ := s.run("exec", "-o", "jsonl", "beta", "make"); !strings.Contains(stdout, `"code":"vm_reset"`) {
		t.Errorf("a reset in JSON: %s", stdout)
	}
}

func TestRunWithoutACommandShowsTheConsole(t *testing.T) {
	for _, c := range []struct {
		reason vmm.Reason
		code   int
	}{
		{vmm.ReasonShutdown, 0}, {vmm.ReasonReset, 0}, {vmm.ReasonKilled, 137}, {vmm.ReasonTripleFault, 125},
	} {
		t.Run(string(c.reason), func(t *testing.T) {
			s := newSession(t)
			s.env.StdoutTerminal = true
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for {
					vms, _ := s.node.List()
					if len(vms) > 4 {
						vms[4].(*fakeVM).end(c.reason)
						return
					}
					time.Sleep(time.Millisecond)
				}
			}()
			s.node.console = "login: \x1b[2J\r\n"
			stdout, stderr, code := s.run("run", "debian")
			<-ended
			if code != c.code || stdout != "login: ^[[2J\n" {
				t.Errorf("exit code %d, want %d; stdout %q, stderr %q", code, c.code, stdout, stderr)
			}
		})
	}
}

func TestLogs(t *testing.T) {
	s := newSession(t)
	s.node.vms[2].console = "one\ntwo\n\x1b[1mthree\r\n"
	for _, c := range []struct {
		line     string
		terminal bool
		want     string
	}{
		{"logs gamma", false, "one\ntwo\n\x1b[1mthree\r\n"},
		{"logs gamma", true, "one\ntwo\n^[[1mthree\n"},
		{"logs -n 2 gamma", false, "two\n\x1b[1mthree\r\n"},
		{"logs --tail 0 gamma", false, ""},
		{"logs -n 99 gamma", false, "one\ntwo\n\x1b[1mthree\r\n"},
		{"logs -f gamma", false, "one\ntwo\n\x1b[1mthree\r\n"},
	} {
		s.env.StdoutTerminal = c.terminal
		if stdout, stderr, code := s.run(strings.Fields(c.line)...); code != 0 || stdout != c.want {
			t.Errorf("%s: exit code %d, %q %s", c.line, code, stdout, stderr)
		}
	}
}

// A record is proven across the rollouts that it grew from, by the heads that snapshots
// and forks have of them.
func TestVerifyFollowsOrigins(t *testing.T) {
	s := newSession(t)
	begin := func(id string, c journal.Created) journal.Head {
		t.Helper()
		_, j := s.node.addRollout(id)
		defer j.Close()
		if _, err := j.Append(journal.EventCreated, c); err != nil {
			t.Fatal(err)
		}
		head, err := j.Append(journal.EventPaused, struct{}{})
		if err != nil {
			t.Fatal(err)
		}
		return head
	}
	trunk := begin("100000000001", journal.Created{VM: "100000000001", Image: "debian"})
	branch := begin("100000000002", journal.Created{VM: "100000000002", Snapshot: "s", SnapshotOf: &journal.Origin{Rollout: "100000000001", Head: trunk}})
	begin("100000000003", journal.Created{VM: "100000000003", Parent: "100000000002", ParentSeq: branch.Seq, ParentHash: branch.Hash})
	begin("100000000004", journal.Created{VM: "100000000004", Parent: "100000000002", ParentSeq: 1, ParentHash: branch.Hash})
	begin("100000000005", journal.Created{VM: "100000000005", Parent: "c0ffee000000", ParentSeq: 3, ParentHash: branch.Hash})

	var v verifyView
	stdout, stderr, code := s.run("log", "100000000003", "--verify", "-o", "json")
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 || !v.Sound || len(v.Origins) != 2 ||
		!v.Origins[0].Proven || v.Origins[0].Head != branch || !v.Origins[1].Proven || v.Origins[1].Head != trunk {
		t.Errorf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	if stdout, stderr, code := s.run("log", "100000000004", "--verify"); code == 0 || !strings.Contains(stderr, "line 1 of rollout 100000000002") {
		t.Errorf("another line: exit code %d, %s%s", code, stdout, stderr)
	}
	if stdout, stderr, code := s.run("log", "100000000005", "--verify"); code != 0 || !strings.Contains(stderr, "c0ffee000000") {
		t.Errorf("no record: exit code %d, %s%s", code, stdout, stderr)
	}
}

// A console log that was shortened from the front is read on where it was left.
func TestConsoleFindsItsPlace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "console.log")
	var all strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&all, "line %d\n", i)
	}
	text := all.String()
	half := len(text) / 2
	if err := os.WriteFile(path, []byte(text[:half]), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := openConsole(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var got bytes.Buffer
	if err := c.copy(&got); err != nil {
		t.Fatal(err)
	}
	// The writer keeps the last 2000 bytes of what there was and goes on.
	if err := os.WriteFile(path, []byte(text[half-2000:half+1000]), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.copy(&got); err != nil {
		t.Fatal(err)
	}
	if got.String() != text[:half+1000] {
		t.Errorf("read %d bytes, want %d; the end is %q", got.Len(), half+1000, got.String()[max(0, got.Len()-40):])
	}
	// So much came that the place is gone: from the beginning.
	if err := os.WriteFile(path, []byte("new\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got.Reset()
	if err := c.copy(&got); err != nil || got.String() != "new\n" {
		t.Errorf("got %q, %v", got.String(), err)
	}
}

func TestParsePlace(t *testing.T) {
	for s, want := range map[string]place{
		"vm:/etc/passwd": {"vm", "/etc/passwd"},
		"vm:file":        {"vm", "/file"},
		"vm:":            {"vm", "/"},
		"vm:/a:b":        {"vm", "/a:b"},
		"file":           {"", "file"},
		"./vm:file":      {"", "./vm:file"},
		"/tmp/a:b":       {"", "/tmp/a:b"},
		"dir/a:b":        {"", "dir/a:b"},
		":x":             {"", ":x"},
	} {
		if got := parsePlace(s); got != want {
			t.Errorf("%q: %+v, want %+v", s, got, want)
		}
	}
}

func TestCopy(t *testing.T) {
	s := newSession(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "fix.patch")
	if err := os.WriteFile(file, []byte("patch"), 0o640); err != nil {
		t.Fatal(err)
	}
	vm := s.node.vms[0]
	for _, target := range []string{"alpha:/srv/new", "alpha:/srv/", "alpha:/root", "alpha:rel"} {
		if _, stderr, code := s.run("cp", file, target); code != 0 {
			t.Errorf("%s: exit code %d: %s", target, code, stderr)
		}
	}
	want := map[string]string{"/srv/new": "patch", "/srv/fix.patch": "patch", "/root/fix.patch": "patch", "/rel": "patch"}
	if !reflect.DeepEqual(vm.files, want) {
		t.Errorf("files in the guest: %v", vm.files)
	}

	stdout, _, code := s.run("cp", "-o", "json", "alpha:/srv/new", dir)
	if code != 0 || !strings.Contains(stdout, `"bytes": 5`) {
		t.Errorf("exit code %d: %s", code, stdout)
	}
	info, err := os.Stat(filepath.Join(dir, "new"))
	if err != nil || info.Mode() != 0o755 {
		t.Errorf("mode %v, %v: a guest's setuid bit must not arrive", info, err)
	}
	for line, code := range map[string]string{
		"cp alpha:/none " + dir + "/none -o json": "file_not_found",
		"cp " + dir + " alpha:/srv/new -o json":   "invalid_argument",
		"cp " + file + " " + dir + "/y -o json":   "invalid_argument",
		"cp alpha:/a beta:/b -o json":             "invalid_argument",
		"cp " + file + " beta:/x -o json":         "vm_not_running",
		"cp " + dir + "/gone alpha:/x -o json":    "invalid_argument",
	} {
		if _, stderr, exit := s.run(strings.Fields(line)...); exit == 0 || !strings.Contains(stderr, `"code":"`+code+`"`) {
			t.Errorf("%s: exit code %d: %s", line, exit, stderr)
		}
	}
	left, _ := filepath.Glob(filepath.Join(dir, ".forkvm-*"))
	if len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestCopyTrees(t *testing.T) {
	s := newSession(t)
	dir := t.TempDir()
	project := filepath.Join(dir, "project")
	if err := errors.Join(os.MkdirAll(filepath.Join(project, "src"), 0o755), os.WriteFile(filepath.Join(project, "src", "a"), []byte("aa"), 0o644)); err != nil {
		t.Fatal(err)
	}
	vm := s.node.vms[0]
	vm.files["/srv/old"] = "old"
	for _, args := range [][]string{{project, "alpha:/srv"}, {project, "alpha:/new"}, {project + "/.", "alpha:/srv/"}} {
		if _, stderr, code := s.run("cp", args[0], args[1]); code != 0 {
			t.Errorf("%s: exit code %d: %s", args, code, stderr)
		}
	}
	want := map[string]string{"/srv/old": "old", "/srv/project/src/a": "aa", "/new/src/a": "aa", "/srv/src/a": "aa"}
	if !reflect.DeepEqual(vm.files, want) {
		t.Errorf("files in the guest: %v", vm.files)
	}
	for _, args := range [][]string{{"alpha:/srv/project", dir + "/back"}, {"alpha:/srv/project/.", dir}, {"alpha:/srv/project/", dir + "/back"}} {
		if _, stderr, code := s.run("cp", args[0], args[1]); code != 0 {
			t.Errorf("%s: exit code %d: %s", args, code, stderr)
		}
	}
	for _, name := range []string{"back/src/a", "src/a", "back/project/src/a"} {
		if data, err := os.ReadFile(filepath.Join(dir, name)); string(data) != "aa" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}

func TestExplainKeepsCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want failure.Code
	}{
		{failure.New(failure.NoSpace, "x"), failure.NoSpace},
		{fmt.Errorf("more: %w", failure.New(failure.VMExists, "x")), failure.VMExists},
		{usagef("x"), failure.InvalidArgument},
		{fmt.Errorf("exec: %w", &client.Error{Code: proto.CodeUserNotFound}), failure.Code(proto.CodeUserNotFound)},
		{&client.ConnectionError{Op: "exec", Err: io.EOF}, failure.GuestNotReady},
		{&client.ConnectionError{Op: "exec", Err: context.Canceled}, failure.Cancelled},
		{&os.PathError{Op: "open", Path: "/x", Err: syscall.EACCES}, failure.NoPermission},
		{errors.New("odd"), failure.Internal},
	} {
		if got := explain(c.err); got.Code != c.want || got.Message != c.err.Error() {
			t.Errorf("%v: %+v, want %s", c.err, got, c.want)
		}
	}
}

// gone is an output that nobody reads.
type gone struct{}

func (gone) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.EPIPE}
}

func TestClosedPipeIsNoFailureToTalkAbout(t *testing.T) {
	s := newSession(t)
	var stderr bytes.Buffer
	e := s.env
	e.Stdout, e.Stderr = gone{}, &stderr
	code := Main(t.Context(), e, []string{"--config", os.DevNull, "ls"})
	if code != exitPipeGone || stderr.Len() > 0 {
		t.Errorf("exit code %d, stderr %q", code, &stderr)
	}
}

func TestProgressOnlyWhereSomebodyLooks(t *testing.T) {
	for _, c := range []struct {
		name     string
		terminal bool
		env      string
		quiet    string
		want     bool
	}{
		{"terminal", true, "", "--quiet=false", true},
		{"no terminal", false, "", "--quiet=false", false},
		{"quiet", true, "", "--quiet", false},
		{"NO_COLOR", true, "NO_COLOR", "--quiet=false", false},
		{"CI", true, "CI", "--quiet=false", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSession(t)
			s.env.StderrTerminal = c.terminal
			s.getenv[c.env] = "1"
			stdout, stderr, code := s.run("image", "build", "new", "--kernel", "k", c.quiet)
			if code != 0 || stdout != "new\n" || (stderr != "") != c.want {
				t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout, stderr)
			}
			if agent := s.node.built[0].Agent; agent != "/usr/libexec/forkvm-agent" {
				t.Errorf("guest agent %q", agent)
			}
		})
	}
}

// Messages may quote a guest, which must not steer the terminal.
func TestMessagesAreHarmless(t *testing.T) {
	s := newSession(t)
	s.node.bootErr = failure.New(failure.GuestEnded, "vm ended: %s", "\x1b]0;pwned\x07\nforkvm: all is well")
	_, stderr, _ := s.run("create", "debian")
	if strings.Count(stderr, "\n") != 1 || strings.ContainsAny(stderr, "\x1b\x07") {
		t.Errorf("stderr %q", stderr)
	}
}

func TestCompletionAndHelp(t *testing.T) {
	s := newSession(t)
	for _, line := range []string{"completion bash", "help run", "run --help", "run debian --help", "exec --help", "--help", "snapshot", "image"} {
		if stdout, stderr, code := s.run(strings.Fields(line)...); code != 0 || stdout == "" || stderr != "" {
			t.Errorf("%s: exit code %d, %d bytes, %s", line, code, len(stdout), stderr)
		}
	}
}
