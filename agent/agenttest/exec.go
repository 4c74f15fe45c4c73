package agenttest

import (
	"context"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
)

// B6: exec returns when the main process has ended, whoever holds its streams, and has all of its output.
func B6(t *testing.T, g *Guest) {
	const soon = 2 * time.Second
	g.killAtEnd(t, "1", "2", "3", "6")
	quick := func(t *testing.T, cmd client.Command, want string) {
		t.Helper()
		begun := time.Now()
		r, o := g.exec(t, cmd)
		g.within(t, "returned", begun, soon)
		if r.ExitCode != 0 || !strings.Contains(o.stdout.String(), want) {
			t.Errorf("got %+v, output %.100q, want %q", r, &o.stdout, want)
		}
	}
	t.Run("1 sleeping child", func(t *testing.T) { quick(t, script(`sleep 300 & echo $! >1; echo hi`), "hi\n") })
	t.Run("2 writing child", func(t *testing.T) {
		quick(t, script(`(n=0; while :; do echo x; n=$((n+1)); echo $n >written.new; mv written.new written; sleep 1; done) & echo $! >2; echo done`), "done\n")
	})
	// What nohup does, which not every guest has.
	t.Run("3 nohup", func(t *testing.T) { quick(t, script(`(trap "" HUP; exec sleep 300) & echo $! >3`), "") })
	t.Run("4 stdin held open", func(t *testing.T) {
		r, w := io.Pipe()
		defer w.Close()
		quick(t, client.Command{Args: []string{"true"}, Stdin: r}, "")
	})
	t.Run("5 stdin held open and a timeout", func(t *testing.T) {
		in, w := io.Pipe()
		defer w.Close()
		begun := time.Now()
		r, _ := g.exec(t, client.Command{Args: []string{"sleep", "60"}, Stdin: in, Timeout: 3 * time.Second})
		g.within(t, "timed out", begun, 3500*time.Millisecond)
		if !r.TimedOut || r.ExitCode != 124 || r.Signal != 9 || r.DurationMS < 2500 || g.Counted && r.DurationMS > 3500 {
			t.Errorf("got %+v, want a timeout after 3 s", r)
		}
	})
	t.Run("6 all bytes", func(t *testing.T) {
		begun := time.Now()
		r, o := g.exec(t, script(`sleep 300 & echo $! >6; head -c 1000000 /dev/zero`))
		g.within(t, "returned", begun, soon)
		if r.ExitCode != 0 || o.stdout.Len() != 1_000_000 {
			t.Errorf("exit code %d, %d bytes, want 1000000", r.ExitCode, o.stdout.Len())
		}
	})
	t.Run("7 stdin closed", func(t *testing.T) {
		quick(t, client.Command{Args: []string{"cat"}, Stdin: strings.NewReader("last words")}, "last words")
	})
	// The writing child has met the pipe that nobody reads any more when it has written again.
	before := g.number(t, "cat written")
	g.eventually(t, "the child of 2 writes on", patience, func() bool { return g.number(t, "cat written") > before+1 })
	for _, file := range []string{"1", "2", "3", "6"} {
		if !g.alive(t, file) {
			t.Errorf("background process %s is gone", file)
		}
	}
}

// marked lists the processes of the guest with an entry in their environment.
func (g *Guest) marked(t testing.TB, entry string) string {
	t.Helper()
	return g.sh(t, "grep -l "+entry+" /proc/[0-9]*/environ 2>/dev/null | tr '\\n' ' '")
}

// B7: a timeout reaches every descendant, and nobody else. It needs a guest agent with cgroups.
func B7(t *testing.T, g *Guest) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	other, err := g.Start(ctx, client.Command{Args: []string{"sleep", "300"}})
	if err != nil {
		t.Fatal(err)
	}
	const detached = "survives"
	if _, err := g.Detach(ctx, client.Command{Args: []string{"sleep", "300"}, OperationID: detached}); err != nil {
		t.Fatal(err)
	}
	beat := func(name string) string { return "sh -c 'while :; do echo . >>" + name + ".beat; sleep 0.1; done'" }
	text := strings.Join([]string{
		beat("plain") + " &",
		strings.Replace(beat("ignores"), "'", `'trap "" TERM HUP INT; `, 1) + " &",
		"setsid " + beat("session") + " &",
		"(setsid " + beat("daemon") + " >/dev/null 2>&1 </dev/null &) &",
		"unshare --pid --fork " + beat("namespace") + " &",
		"echo partial; echo output >&2",
		"wait; sleep 300",
	}, "\n")
	const mark = "AGENTTEST_B7=1"
	cmd := script(text)
	cmd.Env, cmd.Timeout = []string{mark}, 2*time.Second
	begun := time.Now()
	r, o := g.exec(t, cmd)
	g.within(t, "timed out", begun, 3*time.Second)
	if !r.TimedOut || r.ExitCode != 124 || r.DurationMS < 1500 || o.stdout.String() != "partial\n" || o.stderr.String() != "output\n" {
		t.Errorf("got %+v, output %q and %q", r, &o.stdout, &o.stderr)
	}
	// The agent has waited until nothing is left.
	if left := g.marked(t, mark); left != "" {
		t.Errorf("alive: %s", left)
	}
	sizes := func() string {
		return g.sh(t, "for n in plain ignores session daemon namespace; do stat -c '%n %s' $n.beat; done")
	}
	before := sizes()
	time.Sleep(500 * time.Millisecond)
	if after := sizes(); after != before {
		t.Errorf("files grow: %q, then %q", before, after)
	}
	if err := other.Signal(int(syscall.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if r, err := other.Wait(); err != nil || r.Signal != int(syscall.SIGTERM) {
		t.Errorf("the other command: %+v, %v; want signal 15 from us", r, err)
	}
	if d, err := g.Signal(ctx, detached, int(syscall.SIGKILL), true); err != nil || !d.Running {
		t.Errorf("the detached command: %+v, %v; want one that runs", d, err)
	}
}

// processes prints how many processes there are beside the kernel's own, and how many of them are zombies.
const processes = `k=; [ "$(cat /proc/2/comm 2>/dev/null)" != kthreadd ] || k=2
cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^\([0-9]*\) .*) /\1 /' | awk -v k=$k '$3 != k && $1 != k { n++ } $2 == "Z" { z++ } END { print n + 0, z + 0 }'`

func (g *Guest) processes(t testing.TB) (all, zombies int) {
	t.Helper()
	if _, err := fmt.Sscan(g.sh(t, processes), &all, &zombies); err != nil {
		t.Fatal(err)
	}
	return all, zombies
}

// B8: orphans are reaped, and no exit code is lost to that. It needs a guest agent that is PID 1 and Alone.
func B8(t *testing.T, g *Guest) {
	before, _ := g.processes(t)
	orphans, callers, rounds := g.scale(5000, 1000, 60), g.scale(64, 64, 8), g.scale(200, 40, 16)
	done := make(chan error, 1)
	go func() {
		for range orphans {
			if r, _, err := g.try(script("sleep 0.05 & exit 0")); err != nil || r.ExitCode != 0 {
				done <- fmt.Errorf("with an orphan: %+v, %w", r, err)
				return
			}
		}
		done <- nil
	}()
	signals := []int{1, 2, 9, 15}
	err := workers(callers, func(caller int) error {
		for i := range rounds {
			n := (caller*rounds + i) % 256
			if r, _, err := g.try(script(fmt.Sprintf("exit %d", n))); err != nil || r.ExitCode != n || r.Signal != 0 {
				return fmt.Errorf("exit %d gave %+v, %w", n, r, err)
			}
		}
		if caller >= 20 {
			return nil
		}
		sig := signals[caller%len(signals)]
		if r, _, err := g.try(script(fmt.Sprintf("kill -%d $$; sleep 9", sig))); err != nil || r.Signal != sig || r.ExitCode != 128+sig {
			return fmt.Errorf("signal %d gave %+v, %w", sig, r, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	g.eventually(t, "5 zombies at most and as many processes as before", 2*time.Second, func() bool {
		now, zombies := g.processes(t)
		return zombies <= 5 && now <= before
	})
}

// B9: commands that are stuck, or whose output nobody reads, hold up nobody else.
func B9(t *testing.T, g *Guest) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	defer cancel()
	g.sh(t, "mkfifo fifo")
	resident := func() int64 {
		u, err := g.Usage(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return u.Agent.ResidentBytes
	}
	stuck := g.hold(t)
	defer stuck.release()
	stuck.start(client.Command{Args: []string{"cat", "fifo"}})
	idle := resident()
	if g.Alone && idle > 8<<20 {
		t.Errorf("the guest agent has %d KiB, want 8 MiB at most", idle>>10)
	}
	reader, release := NewUnread()
	defer release()
	stuck.start(client.Command{Args: []string{"sh", "-c", "echo $$ >yes; exec yes"}, Stdout: reader})
	spent := func() int { return g.number(t, "sed 's/.*) //' /proc/$(cat yes)/stat | awk '{ print $12 + $13 }'") }
	g.eventually(t, "the writer is stopped", patience, func() bool {
		if g.sh(t, "cat yes 2>/dev/null || true") == "" {
			return false
		}
		before := spent()
		time.Sleep(200 * time.Millisecond)
		return reader.Count() > 0 && spent() == before
	})
	if grown := resident() - idle; g.Alone && grown > 8<<20 {
		t.Errorf("the guest agent has grown by %d KiB for a reader that does not read", grown>>10)
	}
	if n := reader.Count(); n > 1<<20 {
		t.Errorf("%d bytes on their way to a reader that does not read", n)
	}
	for range g.scale(200, 200, 40) {
		stuck.start(client.Command{Args: []string{"sleep", "300"}})
	}
	limit := func(what string, most time.Duration, do func() error) {
		t.Helper()
		begun := time.Now()
		if err := do(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		g.within(t, what, begun, most)
	}
	for range g.scale(100, 100, 15) {
		limit("echo", 500*time.Millisecond, func() error {
			r, o := g.exec(t, script("echo ok"))
			if r.ExitCode != 0 || o.stdout.String() != "ok\n" {
				return fmt.Errorf("got %+v, %q", r, &o.stdout)
			}
			return nil
		})
		limit("ping", 200*time.Millisecond, func() error { _, err := g.Ping(ctx); return err })
		limit("list of commands", 200*time.Millisecond, func() error { _, err := g.Commands(ctx); return err })
		limit("usage", 200*time.Millisecond, func() error { _, err := g.Usage(ctx); return err })
	}
	t.Logf("the guest agent has %d KiB with %d commands, %d KiB without", resident()>>10, len(stuck.held), idle>>10)
	many := g.scale(100, 100, 40)
	begun := time.Now()
	err := workers(many, func(int) error {
		r, _, err := g.try(client.Command{Args: []string{"sleep", "1"}})
		if err == nil && r.ExitCode != 0 {
			err = fmt.Errorf("got %+v", r)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	g.within(t, fmt.Sprintf("%d times sleep 1 side by side", many), begun, 5*time.Second)
}
