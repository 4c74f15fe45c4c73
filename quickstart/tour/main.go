// Command tour shows forkvm at work on a real environment: it boots the image
// "ledger", a Debian with PostgreSQL and a small project whose test suite has one
// failing test, snapshots it with the database running, starts clones of that,
// repairs the project in two of them, forks one of those while it runs, and
// prints what became of each.
//
// It does everything through the forkvm command, found on PATH, and shows each
// call. It ends with an error if anything is not as it should be.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
)

const (
	imageName = "ledger"
	task      = "ledger"
	project   = "/srv/ledger"
)

func main() {
	dir := flag.String("task", "quickstart/task", "the task's directory, whose solution is the change that repairs the project")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	t := &tour{ctx: ctx, dir: *dir}
	err := t.run()
	t.cleanUp()
	if err != nil {
		fmt.Fprintln(os.Stderr, "tour:", err)
		os.Exit(1)
	}
}

type tour struct {
	ctx context.Context
	dir string // of the task
	vms []string
}

// vm is a row of the closing table.
type vm struct {
	name, parent string
	tests        results
}

// results is what a run of the project's tests came to.
type results struct{ passed, failed int }

func (r results) String() string { return fmt.Sprintf("%d passed, %d failed", r.passed, r.failed) }

func (t *tour) run() error {
	if err := t.build(); err != nil {
		return err
	}
	t.say("Four machines from the snapshot. In each the database answers already.")
	clones := []*vm{{name: "vm1"}, {name: "vm2"}, {name: "vm3"}, {name: "vm4"}}
	for _, v := range clones {
		v.parent = task
		if _, err := t.forkvm("create", "--snapshot", task, "--name", v.name); err != nil {
			return err
		}
		t.vms = append(t.vms, v.name)
		if err := t.answers(v.name); err != nil {
			return err
		}
	}
	if err := t.testAll(clones); err != nil {
		return err
	}
	for _, v := range clones {
		if v.tests.failed != 1 {
			return fmt.Errorf("%s: %v: one test should fail before the fix", v.name, v.tests)
		}
	}

	t.say("The fix goes into two of them, through the guest agent.")
	for _, v := range []*vm{clones[0], clones[2]} {
		if err := t.fix(v.name); err != nil {
			return err
		}
	}

	t.say("One of the two is forked twice while it runs.")
	if _, err := t.forkvm("fork", clones[0].name, "--name", "vm1-a", "--name", "vm1-b"); err != nil {
		return err
	}
	forks := []*vm{{name: "vm1-a", parent: "vm1"}, {name: "vm1-b", parent: "vm1"}}
	t.vms = append(t.vms, "vm1-a", "vm1-b")
	all := append(clones, forks...)
	if err := t.testAll(all); err != nil {
		return err
	}
	fixed := map[string]bool{"vm1": true, "vm3": true, "vm1-a": true, "vm1-b": true}
	for _, v := range all {
		if want := map[bool]int{true: 0, false: 1}[fixed[v.name]]; v.tests.failed != want {
			return fmt.Errorf("%s: %v: %d should fail", v.name, v.tests, want)
		}
	}
	if err := t.isolation(all); err != nil {
		return err
	}
	if err := t.draws(all); err != nil {
		return err
	}
	t.say("Tests that no machine has seen yet judge two of them: in a copy of each, and in a new machine that gets its work tree.")
	for _, of := range []struct {
		*vm
		reward string
	}{{clones[0], "1"}, {clones[1], "0"}} {
		if err := t.judge(of.name, of.reward); err != nil {
			return err
		}
	}
	return t.table(all)
}

// build boots the image and freezes it as the task's snapshot.
func (t *tour) build() error {
	t.say("Build the environment once: boot, wait for PostgreSQL, warm up, freeze.")
	// systemd starts the database; it is there when it answers a query.
	_, err := t.forkvm("create", "--name", "builder", "--cpus", "1", "--memory", "768M", "--ready-timeout", "10m",
		"--ready", "unit:postgresql.service", "--ready", "command:psql -qAt -c 'SELECT count(*) FROM accounts' ledger", imageName)
	if err != nil {
		return err
	}
	t.vms = append(t.vms, "builder")
	// One run before the freeze leaves the interpreter and its modules in the
	// page cache, and every clone starts with it.
	if _, err := t.test("builder"); err != nil {
		return err
	}
	if err := t.startInterpreter("builder"); err != nil {
		return err
	}
	if _, err := t.forkvm("snapshot", "builder", task, "--task", task, "--ready", interpreterReady); err != nil {
		return err
	}
	_, err = t.forkvm("kill", "builder")
	return err
}

func (t *tour) answers(name string) error {
	out, err := t.forkvm("exec", "-u", "dev", name, "--", "psql", "-qAt", "-c", "SELECT sum(balance) FROM accounts", "ledger")
	if err != nil {
		return fmt.Errorf("%s: PostgreSQL does not answer right after the restore: %w", name, err)
	}
	fmt.Printf("    the accounts of %s hold %s\n", name, strings.TrimSpace(out))
	return nil
}

func (t *tour) fix(name string) error {
	if _, err := t.forkvm("cp", filepath.Join(t.dir, "solution", "fix.patch"), name+":/tmp/fix.patch"); err != nil {
		return err
	}
	_, err := t.forkvm("exec", "-u", "dev", "-w", project, name, "--", "git", "apply", "/tmp/fix.patch")
	return err
}

// testAll runs the project's tests in all machines, as many at a time as there
// are processors.
func (t *tour) testAll(vms []*vm) error {
	var wg sync.WaitGroup
	errs := make([]error, len(vms))
	turn := make(chan struct{}, runtime.NumCPU())
	for i, v := range vms {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			v.tests, errs[i] = t.test(v.name)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// test runs the project's tests in one machine. pytest ends with 1 when a test
// failed, which is no error here.
func (t *tour) test(name string) (results, error) {
	var r results
	out, err := t.forkvm("exec", "-u", "dev", "-w", project, name, "--", "python3", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
	var exit *exec.ExitError
	if err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) {
		return r, err
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for part := range strings.SplitSeq(lines[len(lines)-1], ",") {
		var n int
		var what string
		fmt.Sscan(part, &n, &what)
		switch what {
		case "passed":
			r.passed = n
		case "failed":
			r.failed = n
		}
	}
	if r.passed == 0 {
		return r, fmt.Errorf("%s: no test passed:\n%s", name, out)
	}
	return r, nil
}

// isolation leaves a mark in each machine, on disk, in memory and in the
// database, and checks that each has its own mark and nobody else's.
func (t *tour) isolation(vms []*vm) error {
	t.say("Side effects stay where they are: each machine leaves a mark on disk, in memory and in the database.")
	for _, v := range vms {
		mark := fmt.Sprintf(`echo %[1]s >> /home/dev/mark; echo %[1]s >> /dev/shm/mark; psql -qc "INSERT INTO accounts (name, balance) VALUES ('%[1]s', 1)" ledger`, v.name)
		if _, err := t.forkvm("exec", "-u", "dev", v.name, "--", "sh", "-c", mark); err != nil {
			return err
		}
	}
	for _, v := range vms {
		look := `cat /home/dev/mark /dev/shm/mark; psql -qAt -c "SELECT name FROM accounts WHERE name LIKE 'vm%'" ledger; hostname`
		out, err := t.forkvm("exec", "-u", "dev", v.name, "--", "sh", "-c", look)
		if err != nil {
			return err
		}
		if want := strings.Repeat(v.name+"\n", 4); out != want {
			return fmt.Errorf("%s sees %q, not only its own marks", v.name, out)
		}
	}
	fmt.Printf("\nChecked: none of the %d machines sees a file, a memory page or a table row of another.\n", len(vms))
	return nil
}

// judge has a machine judged by the task's own tests.
func (t *tour) judge(name, want string) error {
	out, err := t.forkvm("reward", "-o", "name", name, "--task", t.dir)
	if err != nil {
		return err
	}
	reward := strings.TrimSpace(out)
	fmt.Printf("    the reward of %s is %s\n", name, reward)
	if reward != want {
		return fmt.Errorf("%s has reward %s, not %s", name, reward, want)
	}
	return nil
}

func (t *tour) table(vms []*vm) error {
	w := tabwriter.NewWriter(os.Stdout, 2, 0, 3, ' ', 0)
	fmt.Fprintln(w, "\nVM\tPARENT\tREADY AFTER (ms)\tTESTS PASSED/FAILED\tPRIVATE MEMORY (bytes)")
	for _, v := range vms {
		out, err := t.quiet("inspect", v.name)
		if err != nil {
			return err
		}
		var views []struct {
			ReadyMS      float64 `json:"ready_ms"`
			PrivateBytes int64   `json:"private_bytes"`
		}
		if err := json.Unmarshal([]byte(out), &views); err != nil || len(views) != 1 {
			return fmt.Errorf("inspect %s: %v in %q", v.name, err, out)
		}
		fmt.Fprintf(w, "%s\t%s\t%.1f\t%d/%d\t%d\n", v.name, v.parent, views[0].ReadyMS, v.tests.passed, v.tests.failed, views[0].PrivateBytes)
	}
	return w.Flush()
}

func (t *tour) cleanUp() {
	t.ctx = context.Background() // also after an interrupt
	if len(t.vms) > 0 {
		if _, err := t.quiet(append([]string{"rm", "-f"}, t.vms...)...); err != nil {
			fmt.Fprintln(os.Stderr, "tour:", err)
		}
	}
}

func (t *tour) say(text string) { fmt.Printf("\n%s\n", text) }

// forkvm runs the command and shows it with the time it took.
func (t *tour) forkvm(args ...string) (string, error) {
	begun := time.Now()
	out, err := t.quiet(args...)
	fmt.Printf("  $ forkvm %s   (%.1f s)\n", shown(args), time.Since(begun).Seconds())
	return out, err
}

// shown is a command line cut to what fits.
func shown(args []string) string {
	line := strings.Join(args, " ")
	if i := strings.IndexByte(line, '\n'); i >= 0 {
		line = line[:i]
	}
	if len(line) > 110 {
		line = line[:107] + "..."
	}
	return line
}

func (t *tour) quiet(args ...string) (string, error) {
	var out, messages bytes.Buffer
	cmd := exec.CommandContext(t.ctx, "forkvm", args...)
	cmd.Stdout, cmd.Stderr = &out, &messages
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("forkvm %s: %w: %s", shown(args), err, strings.TrimSpace(messages.String()))
	}
	return out.String(), nil
}
