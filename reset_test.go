package forkvm_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/vmm"
)

// traces is what an episode leaves wherever a guest can keep something. What it
// needs the kernel for and the guest's kernel does not have is left out.
const traces = `mkdir -p /var/spool/cron/crontabs
for f in /tmp /dev/shm /run /root /home/user /var/tmp /opt /srv; do mkdir -p $f; echo trace > $f/trace; done
echo 'export TRACE=1' > /root/.profile; echo trace > /home/user/.bashrc
echo '* * * * * true' > /var/spool/cron/crontabs/root
echo 'trace:x:1001:1001::/home/user:/bin/sh' >> /etc/passwd; echo '10.0.0.1 trace' >> /etc/hosts
rm -f /etc/inittab; echo trace >> /usr/bin/guestload.trace; ln /etc/group /etc/group.linked; chmod 600 /etc/group
sysctl -w vm.swappiness=3 kernel.panic=77 fs.file-max=12345 >/dev/null
hostname trace; date -s '2001-02-03 04:05:06' >/dev/null
ip addr add 10.9.8.7/32 dev lo; ip link set lo up; ip route add 10.9.9.0/24 dev lo
mkdir -p /mnt/trace; mount -t tmpfs trace /mnt/trace; echo trace > /mnt/trace/trace
modprobe dummy 2>/dev/null || true
mkdir -p /sys/fs/cgroup/trace 2>/dev/null || true
guestload traces
setsid sleep 100000 >/dev/null 2>&1 &
dd if=/dev/urandom of=/var/tmp/large bs=64k count=40 2>/dev/null; dd if=/dev/urandom of=/dev/shm/large bs=64k count=40 2>/dev/null
sync; true`

// inventory lists all of that, without what is another in every clone: machine id,
// boot id, generation, and what counts time or draws randomness.
const inventory = `find / -xdev -type f ! -name machine-id | sort | xargs sha256sum
find / -xdev ! -name machine-id ! -path /etc ! -path /proc | sort | xargs stat -c '%n %a %u %g %h %s %Y'
find /tmp /run /dev/shm -type f ! -path '/run/forkvm/*' | sort | xargs -r sha256sum
ls -A /dev /sys/fs/cgroup
ps -o pid,ppid,args | grep -v -e ps -e grep -e '/bin/sh -c' -e '\[kworker' -e sort -e find
find /proc/sys -type f ! -path '/proc/sys/kernel/random/*' ! -name ns_last_pid ! -name '*-state' ! -name '*-nr' ! -path '/proc/sys/fs/quota/*' ! -name netdev_rss_key ! -name tcp_fastopen_key -perm -400 2>/dev/null | sort | xargs grep -sH '' | grep -v -e /proc/sys/kernel/ns_last_pid
cat /proc/self/mountinfo | cut -d' ' -f5-
cut -d' ' -f1-3 /proc/modules
cat /proc/sysvipc/shm /proc/sysvipc/msg /proc/sysvipc/sem
awk '{ print $2, $4, $5, $6, $7, $8, $9 }' /proc/keys
ip addr; ip route; cat /proc/net/unix | wc -l
cat /proc/1/environ | tr '\0' '\n'; hostname; cat /proc/sys/kernel/tainted`

// secret is what an episode has written all over its memory and its disk.
const secret = "what the last episode knew "

// TestCaseH5 lets an episode leave traces everywhere. The next one finds what a
// clone finds that never had an episode before it: after a reset, in a new clone,
// and after a crash. Nothing of it is in the other's memory or disk, and the
// snapshot is what it was. What a reset that cannot be finished ends in is tested in
// internal/machine.
func TestCaseH5(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	first := restore(t, ctx, st, name, forkvm.Config{Name: "episode"})
	want := sh(t, ctx, first, inventory)
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	template := hashTree(t, filepath.Join(st.Path(), "snapshots", name))
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "episode"})
	for episode := range full(2, 2, 1) {
		leaveTraces(t, ctx, vm)
		if err := vm.Reset(ctx); err != nil {
			t.Fatal(err)
		}
		compareLines(t, fmt.Sprintf("episode %d", episode+2), sh(t, ctx, vm, inventory), want)
	}
	noSecrets(t, ctx, vm, "a reset")
	if testing.Short() {
		return
	}
	leaveTraces(t, ctx, vm)
	sh(t, ctx, vm, "(sleep 0.2; echo c > /proc/sysrq-trigger) >/dev/null 2>&1 & true")
	<-vm.Done()
	if err := vm.Reset(ctx); err == nil {
		t.Error("a machine that has crashed was reset")
	}
	if err := vm.Close(); err != nil {
		t.Error(err)
	}
	next := restore(t, ctx, st, name, forkvm.Config{Name: "episode"})
	compareLines(t, "a clone after a crash", sh(t, ctx, next, inventory), want)
	noSecrets(t, ctx, next, "a clone after a crash")
	if hashTree(t, filepath.Join(st.Path(), "snapshots", name)) != template {
		t.Error("the snapshot has changed under its clones")
	}
}

func leaveTraces(t *testing.T, ctx context.Context, vm *forkvm.VM) {
	t.Helper()
	// The secret comes from two halves, so that no command line has it.
	sh(t, ctx, vm, fmt.Sprintf("yes '%s'\"'%s'\" | head -c 4000000 | tee /dev/shm/secret >/root/secret; sync; ", secret[:9], secret[9:])+traces)
	if sh(t, ctx, vm, "cat /dev/shm/trace /mnt/trace/trace; grep -c trace /etc/passwd") != "trace\ntrace\n1" {
		t.Error("the episode left no traces")
	}
}

// noSecrets looks for the secret in all memory and all of the disk that a machine
// does not have from its snapshot.
func noSecrets(t *testing.T, ctx context.Context, vm *forkvm.VM, what string) {
	t.Helper()
	own := openStore(t)
	takeSnapshot(t, ctx, vm, own, "searched")
	err := filepath.WalkDir(filepath.Join(own.Path(), "snapshots", "searched"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if bytes.Contains(data, []byte(secret)) {
			t.Errorf("%s: %s has what the last episode wrote", what, d.Name())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// hashTree is one hash of all files below a directory.
func hashTree(t *testing.T, dir string) (sum [sha256.Size]byte) {
	t.Helper()
	all := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			hash := hashFile(t, path)
			fmt.Fprintf(all, "%s %x\n", d.Name(), hash)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return [sha256.Size]byte(all.Sum(nil))
}

// compareLines names the lines that one text has and the other has not.
func compareLines(t *testing.T, what, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	count := map[string]int{}
	for line := range strings.Lines(got) {
		count[line]++
	}
	for line := range strings.Lines(want) {
		count[line]--
	}
	var out strings.Builder
	for line, n := range count {
		if n > 0 {
			fmt.Fprintf(&out, "+ %s", line)
		} else if n < 0 {
			fmt.Fprintf(&out, "- %s", line)
		}
	}
	t.Errorf("%s finds what a new clone does not (+), or misses something (-):\n%s", what, out.String())
}

// TestResetUnderLoad resets a machine again and again while it computes, writes to
// its disk and echoes on vsock, with connections of the host open.
func TestResetUnderLoad(t *testing.T) {
	rounds := 50
	if testing.Short() {
		rounds = 5
	}
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "loaded"})
	startLoad(t, ctx, vm)
	own := openStore(t)
	takeSnapshot(t, ctx, vm, own, "loaded")
	if err := vm.ResetTo(ctx, own, "loaded"); err != nil {
		t.Fatal(err)
	}
	line := vm.Agent().Line() // connects anew behind each reset
	defer line.Close()
	var longest time.Duration
	for round := range rounds {
		if err := loadGoesOn(ctx, vm); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		conn, err := vm.Dial(ctx, loadPort)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if err := exchange(conn, byte(round), 3000); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		begun := time.Now()
		if err := vm.Reset(ctx); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		longest = max(longest, time.Since(begun))
		if n, err := io.Copy(io.Discard, conn); n != 0 || err != nil {
			t.Errorf("round %d: a connection from before has %d more bytes, %v", round, n, err)
		}
		conn.Close()
		if _, err := line.Ping(ctx); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if err := echo(ctx, vm, byte(round), 2000); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
	}
	t.Logf("%d resets, the longest %v", rounds, longest)
	if err := loadGoesOn(ctx, vm); err != nil {
		t.Error(err)
	}
	sh(t, ctx, vm, "sync")
	takeSnapshot(t, ctx, vm, own, "last")
	checkFilesystem(t, exportDisk(t, own, "last"))
}

// TestResetAmongOthers resets a machine while others take snapshots of it, run
// commands in it, pause it, and in the end close it.
func TestResetAmongOthers(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "busy"})
	own := openStore(t)
	var all sync.WaitGroup
	stop := make(chan struct{})
	again := func(do func(n int) error) {
		all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := do(n); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	again(func(int) error { return vm.Reset(ctx) })
	again(func(n int) error {
		_, err := vm.Snapshot(ctx, own, fmt.Sprintf("step-%d", n))
		return err
	})
	again(func(int) error { return errors.Join(vm.Pause(), vm.Resume()) })
	again(func(int) error {
		// What was interrupted, or meant for an earlier life, says so.
		_, err := vm.Agent().Exec(ctx, client.Command{Args: []string{"sleep", "0.01"}})
		var lost *client.ConnectionError
		var answered *client.Error
		if err != nil && !errors.As(err, &lost) && !errors.As(err, &answered) {
			return err
		}
		return nil
	})
	time.Sleep(2 * time.Second)
	close(stop)
	all.Wait()
	sh(t, ctx, vm, "true")

	resetting := make(chan error)
	go func() { resetting <- vm.Reset(ctx) }()
	if err := vm.Close(); err != nil {
		t.Error(err)
	}
	if err := <-resetting; err == nil {
		t.Log("the reset was over when the machine was closed")
	} else if exit := vm.Exit(); exit == nil || exit.Reason != vmm.ReasonKilled {
		t.Errorf("reset: %v; exit %+v, want %s", err, exit, vmm.ReasonKilled)
	}
	infos, err := own.List()
	if err != nil || len(infos) == 0 {
		t.Fatalf("%d snapshots, %v", len(infos), err)
	}
	clone := restore(t, ctx, own, infos[len(infos)-1].Name, forkvm.Config{Name: "clone"})
	sh(t, ctx, clone, "true")
}
