package machine

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/vmm"
	"github.com/forkvm/forkvm/vmm/boot/acpi"
	"github.com/forkvm/forkvm/vmm/memory"
)

// resetPatience bounds a test's waiting for guests, in counted time.
const resetPatience = 5 * time.Minute

// bootCheckpoint boots a guest with a disk and returns a checkpoint of it, which
// the test closes. The guest is gone.
func bootCheckpoint(t *testing.T, ctx context.Context) *Checkpoint {
	t.Helper()
	m := bootDisk(t, ctx, judgeMemory)
	id := NewIdentity("source", TimeHost)
	if _, err := m.Reset(ctx, target(t, m, id, nil)); !errors.Is(err, ErrNoOrigin) {
		t.Errorf("reset of a booted machine: %v", err)
	}
	run(t, ctx, m, "sync")
	taken := take(t, m)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	return taken
}

func take(t *testing.T, m *Machine) *Checkpoint {
	t.Helper()
	tops, err := NewTops(m.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	checkpoint, err := m.Checkpoint(tops)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { checkpoint.Close() })
	if !checkpoint.Compactable {
		return checkpoint
	}
	files, err := NewTops(m.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Compact(files); err != nil {
		t.Fatal(err)
	}
	return checkpoint
}

// clone makes a machine of a checkpoint, which has not begun.
func clone(t *testing.T, c *Checkpoint, id Identity) *Machine {
	t.Helper()
	own, err := c.Clone()
	if err != nil {
		t.Fatal(err)
	}
	var config Config
	own.Configure(&config)
	return build(t, config, id)
}

func bring(t *testing.T, ctx context.Context, m *Machine, id Identity) {
	t.Helper()
	if err := m.Bring(ctx, id); err != nil {
		t.Fatal(err)
	}
}

// target is where to reset a machine, with a checkpoint of its own.
func target(t *testing.T, m *Machine, id Identity, to *Checkpoint) Target {
	t.Helper()
	if to != nil {
		var err error
		if to, err = to.Clone(); err != nil {
			t.Fatal(err)
		}
	}
	return Target{To: to, Tops: newTops(t, m), Identity: id}
}

func newTops(t *testing.T, m *Machine) []*os.File {
	t.Helper()
	tops, err := NewTops(m.Shape(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return tops
}

// attempt runs a shell script in a guest and returns its output.
func attempt(ctx context.Context, m *Machine, script string) (string, error) {
	var out bytes.Buffer
	result, err := m.Agent().Exec(ctx, client.Command{Args: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &out})
	if err == nil && result.ExitCode != 0 {
		err = errors.New(out.String())
	}
	return strings.TrimRight(out.String(), "\n"), err
}

func run(t *testing.T, ctx context.Context, m *Machine, script string) string {
	t.Helper()
	out, err := attempt(ctx, m, script)
	if err != nil {
		t.Fatalf("%s: %v (%v)\n%s", script, err, m.Exit(), strings.Join(m.ConsoleTail(), "\n"))
	}
	return out
}

// dirty leaves traces in memory, on the disk and in the process table.
const dirty = `echo life > /root/life; echo life > /dev/shm/life; mkdir -p /var/tmp/life; rm -f /etc/motd
dd if=/dev/urandom of=/var/tmp/life/data bs=64k count=30 2>/dev/null; sync
hostname changed; echo changed > /etc/machine-id
(while :; do dd if=/dev/urandom of=/root/busy bs=4k count=20 conv=fsync; done) >/dev/null 2>&1 &
setsid sleep 1000 >/dev/null 2>&1 & true`

// listing is what a guest sees of its own state, without what may differ between
// two clones: the kernel's workers come and go, the link count of /proc has them, and
// the machine id is as old as the renewal. All other processes are among those that
// ps names, which comes first, before the script has had others of its own.
const listing = `ps | grep -v -e ' ps' -e 'sh -c' -e '\[kworker' | awk '{ print $1, $4, $5, $6 }'
(ls -la --full-time / /root /tmp /dev/shm /etc /var/tmp 2>/dev/null || ls -la / /root /tmp /dev/shm /etc /var/tmp) |
  sed '/ proc$/s/^\([^ ]*\) *[0-9]*/\1/;/ machine-id$/d'
find /root /etc /var/tmp /dev/shm -xdev -type f ! -name machine-id | sort | xargs sha256sum
cat /proc/mounts; hostname`

func TestReset(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	origin := bootCheckpoint(t, ctx)
	id := NewIdentity("clone", TimeHost)
	fresh := clone(t, origin, id)
	ram, disk := ramOf(t, fresh), diskOf(t, fresh)
	bring(t, ctx, fresh, id)
	want := run(t, ctx, fresh, listing)

	m := clone(t, origin, id)
	bring(t, ctx, m, id)
	for life := range 3 {
		run(t, ctx, m, dirty)
		if life == 1 {
			take(t, m) // what it froze goes, too
			run(t, ctx, m, "echo again > /root/life")
		}
		conn, err := m.Dial(ctx, proto.Port)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		old := m.Agent()
		started, out := io.Pipe()
		process, err := old.Start(ctx, client.Command{Args: []string{"sh", "-c", "echo; sleep 1000"}, Stdout: out})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := started.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		id = id.Next()
		checkRewound(t, ctx, m, target(t, m, id, nil), ram, disk)
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("life %d: read of a connection from before: %v", life, err)
		}
		var lost *client.ConnectionError
		if _, err := process.Wait(); !errors.As(err, &lost) || !lost.Started {
			t.Errorf("life %d: a command that ran has %v", life, err)
		}
		if _, err := old.Exec(ctx, client.Command{Args: []string{"true"}}); !errors.Is(err, &client.Error{Code: proto.CodeGenerationMismatch}) {
			t.Errorf("life %d: a client from before has %v", life, err)
		}
		if got := run(t, ctx, m, listing); got != want {
			t.Errorf("life %d: guest sees\n%s\na new clone sees\n%s", life, got, want)
		}
		if got := len(m.layers.sealed); got != len(origin.Memory) {
			t.Errorf("life %d: %d memory layers, want %d", life, got, len(origin.Memory))
		}
	}
}

// checkRewound resets a machine and, before it runs again, compares it with a new
// clone that has not begun.
func checkRewound(t *testing.T, ctx context.Context, m *Machine, to Target, ram, disk contents) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.Machine.Pause(); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	if err := m.rewind(&to, new(Timeline)); err != nil {
		t.Fatal(err)
	}
	rewound := time.Since(begun)
	const generationPage = acpi.GenerationIDAddress / memory.PageSize
	if pages := ramOf(t, m).differing(ram); len(pages) != 1 || pages[0] != generationPage {
		t.Errorf("pages %x of memory differ from a clone's, want %#x only", pages, generationPage)
	}
	diskOf(t, m).compare(t, "disk", disk)
	begun = time.Now()
	if err := m.Bring(ctx, to.Identity); err != nil {
		t.Fatal(err)
	}
	t.Logf("put back in %v, guest ready after another %v", rewound, time.Since(begun))
	if err := to.close(); err != nil {
		t.Error(err)
	}
}

func TestResetToCheckpoints(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	origin := bootCheckpoint(t, ctx)
	id := NewIdentity("clone", TimeHost)
	m := clone(t, origin, id)
	bring(t, ctx, m, id)
	var steps []*Checkpoint
	for _, step := range []string{"one", "two"} {
		run(t, ctx, m, "echo "+step+" | tee /root/step > /dev/shm/step; sync")
		steps = append(steps, take(t, m))
	}
	show := "cat /root/step /dev/shm/step 2>/dev/null || echo none"
	reset := func(to *Checkpoint, want string) {
		t.Helper()
		id = id.Next()
		if _, err := m.Reset(ctx, target(t, m, id, to)); err != nil {
			t.Fatal(err)
		}
		if got := run(t, ctx, m, "echo 3 > /proc/sys/vm/drop_caches; "+show); got != want {
			t.Errorf("guest has %q, want %q", got, want)
		}
		run(t, ctx, m, "echo other | tee /root/step > /dev/shm/step")
	}
	// rewound does the same and compares with a new clone that has not begun.
	rewound := func(to *Checkpoint) {
		t.Helper()
		fresh := clone(t, to, id)
		ram, disk := ramOf(t, fresh), diskOf(t, fresh)
		if err := fresh.Close(); err != nil {
			t.Fatal(err)
		}
		id = id.Next()
		checkRewound(t, ctx, m, target(t, m, id, to), ram, disk)
		run(t, ctx, m, "echo rewound | tee /root/step > /dev/shm/step")
	}
	reset(nil, "none")
	reset(steps[0], "one\none")
	reset(nil, "one\none") // that is what it comes from now
	reset(steps[1], "two\ntwo")
	rewound(steps[0])
	reset(nil, "one\none")
	reset(origin, "none")

	// A paused machine stays paused.
	if err := m.Pause(); err != nil {
		t.Fatal(err)
	}
	id = id.Next()
	if _, err := m.Reset(ctx, target(t, m, id, nil)); err != nil {
		t.Fatal(err)
	}
	if !m.Paused() || m.Generation() != id.Generation {
		t.Errorf("paused: %v, generation %s, want true and %s", m.Paused(), m.Generation(), id.Generation)
	}
	if err := m.Resume(); err != nil {
		t.Fatal(err)
	}
	if got := run(t, ctx, m, show); got != "none" {
		t.Errorf("guest has %q", got)
	}

	// What does not fit changes nothing.
	other := *steps[0]
	other.Shape.CPUs++
	var misfit *ShapeError
	if _, err := m.Reset(ctx, target(t, m, id, &other)); !errors.As(err, &misfit) {
		t.Errorf("reset to a machine with more vCPUs: %v", err)
	}
	run(t, ctx, m, "true")
}

// TestResetThatFails ends the machine: it is neither the old one nor a new one.
func TestResetThatFails(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	id := NewIdentity("clone", TimeHost)
	m := clone(t, bootCheckpoint(t, ctx), id)
	bring(t, ctx, m, id)
	m.origin.Sections = m.origin.Sections[:len(m.origin.Sections)-1]
	_, err := m.Reset(ctx, target(t, m, id.Next(), nil))
	if err == nil || !strings.Contains(err.Error(), "state has no section") {
		t.Errorf("reset: %v", err)
	}
	if exit := m.Exit(); exit == nil || exit.Reason != vmm.ReasonResetFailed {
		t.Errorf("ended with %+v, want %s", exit, vmm.ReasonResetFailed)
	}
	if _, err := m.Reset(ctx, target(t, m, id.Next(), nil)); !errors.Is(err, vmm.ErrEnded) {
		t.Errorf("reset of a machine that has ended: %v", err)
	}
}
