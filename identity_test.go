package forkvm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/store"
)

// How many clones of one snapshot are compared with each other: those that draw
// randomness all the time, and those that are only asked who they are.
const (
	drawing = 8
	clones  = 50
)

// restoreAll makes clones of a snapshot at once.
func restoreAll(t *testing.T, ctx context.Context, st *store.Store, name string, n int) []*forkvm.VM {
	t.Helper()
	vms, errs := make([]*forkvm.VM, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		c := config(t, forkvm.Config{Name: fmt.Sprintf("clone-%d", i)})
		all.Go(func() { vms[i], errs[i] = forkvm.Restore(ctx, st, name, c) })
	}
	all.Wait()
	for _, vm := range vms {
		if vm != nil {
			closeAtEnd(t, vm)
		}
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return vms
}

// distinct checks that all values differ.
func distinct(t *testing.T, what string, values []string) {
	t.Helper()
	seen := map[string]int{}
	for i, v := range values {
		if j, had := seen[v]; had || v == "" {
			t.Errorf("%s of machines %d and %d: both %q", what, j, i, v)
		}
		seen[v] = i
	}
}

// reseeds counts the guest kernel's reports of a new generation.
func reseeds(t *testing.T, ctx context.Context, vm *forkvm.VM) int {
	t.Helper()
	n, err := strconv.Atoi(sh(t, ctx, vm, "dmesg | grep -c 'reseeded due to virtual machine fork' || true"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

const drawn = "/dev/shm/random"

// TestCaseA1 has a guest draw randomness all the time, before, during and after
// a snapshot: no two clones draw the same once Restore or Fork has returned.
func TestCaseA1(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "source"})
	sh(t, ctx, vm, "setsid guestload draw -to "+drawn+" >/dev/null 2>&1 & until [ -s "+drawn+" ]; do sleep 0.05; done")
	certificate := startTLS(t, ctx, vm)
	own := openStore(t)
	takeSnapshot(t, ctx, vm, own, "drawing")
	before := reseeds(t, ctx, vm)

	all := restoreAll(t, ctx, own, "drawing", drawing)
	for i, clone := range all {
		if got := reseeds(t, ctx, clone); got != before+1 {
			t.Errorf("clone %d: kernel reseeded %d times for a new generation, want 1", i, got-before)
		}
	}
	children := fork(t, ctx, all[0], forkvm.Config{Name: "child"})
	for i, child := range children {
		if got := reseeds(t, ctx, child); got != before+2 {
			t.Errorf("child %d: kernel reseeded %d times in two generations", i, got-before)
		}
	}
	all = append(append(all, vm), children...)

	var generations []string
	for _, vm := range all {
		generations = append(generations, sh(t, ctx, vm, "cat /run/forkvm/generation"))
	}
	distinct(t, "generation", generations)
	compareDraws(t, ctx, all, generations)

	// A program that has been running since before the snapshot.
	var hellos []string
	for _, vm := range all {
		random, err := handshake(ctx, vm, certificate)
		if err != nil {
			t.Fatal(err)
		}
		hellos = append(hellos, random)
	}
	distinct(t, "random of a TLS client", hellos)
}

// draw is one value that a machine drew.
type draw struct {
	generation, value string
	at                time.Duration // the guest's monotonic time
}

// compareDraws looks for equal values among those that machines drew under their
// own generations. It also tells for how long after a clone's start, before it
// had its generation, values were drawn twice.
func compareDraws(t *testing.T, ctx context.Context, vms []*forkvm.VM, generations []string) {
	t.Helper()
	owners, firsts := map[string]int{}, map[string]draw{}
	var window time.Duration
	repeated := 0
	for i, vm := range vms {
		var common time.Duration // when the last value of the common past was drawn
		own := 0
		for _, d := range drawsOf(t, ctx, vm, generations[i]) {
			first, had := firsts[d.value]
			if !had {
				firsts[d.value] = d
			}
			switch {
			case d.generation == generations[i]:
				own++
				if j, had := owners[d.value]; had {
					t.Errorf("machines %d and %d both drew %s", j, i, d.value)
				}
				owners[d.value] = i
			case had && first.at == d.at:
				common = d.at
			case had:
				repeated++
				window = max(window, d.at-common)
			}
		}
		if own < 10 {
			t.Errorf("machine %d drew %d times under its own generation: too few to say anything", i, own)
		}
	}
	t.Logf("%d draws under own generations, all different; before that %d values drawn twice, over %v of the guest's time",
		len(owners), repeated, window)
}

// drawsOf returns what a machine has drawn, once that is something under this
// generation.
func drawsOf(t *testing.T, ctx context.Context, vm *forkvm.VM, generation string) (draws []draw) {
	t.Helper()
	sh(t, ctx, vm, fmt.Sprintf("until [ $(grep -c %s %s) -ge 20 ]; do sleep 0.05; done", generation, drawn))
	var out bytes.Buffer
	if _, err := vm.Agent().Get(ctx, drawn, &out); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		var d draw
		if n, _ := fmt.Sscan(line, &d.generation, &d.value, &d.at); n == 3 && strings.HasSuffix(line, "\n") {
			draws = append(draws, d)
		}
	}
	return draws
}

// clockTolerance is how far a guest's clock may be off, beyond the time that it
// took to ask: half a second.
const clockTolerance = 500 * time.Millisecond

// checkClock compares the guest's clock, read by its next command, with a clock
// that is this far away from the host's.
func checkClock(t *testing.T, ctx context.Context, vm running, what string, away time.Duration, tolerance time.Duration) {
	t.Helper()
	before := time.Now()
	ns, err := strconv.ParseInt(sh(t, ctx, vm, "guestload now"), 10, 64)
	after := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	got := time.Unix(0, ns).Add(-away)
	if got.Before(before.Add(-tolerance)) || got.After(after.Add(tolerance)) {
		t.Errorf("%s: guest's clock is %v off (asked from %v to %v)", what, got.Sub(before).Round(time.Millisecond),
			before.Format(time.StampMilli), after.Format(time.StampMilli))
	}
}

// threeDays is how old the guest's clock is made before snapshots.
const threeDays = 72 * time.Hour

// TestCaseA2 looks at the wall clock of the first command after a cold boot, a
// restore of an old snapshot, a fork and a pause, with each clock source that
// the guest's kernel offers.
func TestCaseA2(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	t.Run("cold boot and tsc", func(t *testing.T) { testBootedClock(t, ctx) })
	sources := strings.Fields(clockSources(t, ctx, st, name))
	t.Logf("clock sources: %s", sources)
	for _, source := range sources {
		if source != "kvm-clock" && source != "tsc" {
			continue
		}
		t.Run(source, func(t *testing.T) { testClock(t, ctx, st, name, source) })
	}
}

// testBootedClock looks at the clock of a guest that has just been booted, and of
// its clone while it keeps time with the TSC. By itself the kernel does not
// trust an emulated TSC.
func testBootedClock(t *testing.T, ctx context.Context) {
	booted := newGuest(t, "memory", machine.Size{CPUs: 1, CommandLine: "tsc=reliable"})
	booted.build(t)
	if err := booted.machine.Bring(ctx, booted.id); err != nil {
		t.Fatal(err)
	}
	putProgram(t, ctx, booted.machine)
	checkClock(t, ctx, booted.machine, "cold boot", 0, clockTolerance)
	useSource(t, ctx, booted.machine, "tsc")
	checkClock(t, ctx, booted.machine, "clock source changed", 0, clockTolerance)
	setClockBack(t, ctx, booted.machine)
	clone := booted.clone(t)
	if err := clone.machine.Bring(ctx, clone.id); err != nil {
		t.Fatal(err)
	}
	checkClock(t, ctx, clone.machine, "clone with tsc", 0, clockTolerance)
	time.Sleep(2 * time.Second)
	checkClock(t, ctx, clone.machine, "clone with tsc after some time", 0, clockTolerance)
}

func useSource(t *testing.T, ctx context.Context, m running, source string) {
	t.Helper()
	sh(t, ctx, m, fmt.Sprintf("echo %s > %scurrent_clocksource; [ $(cat %[2]scurrent_clocksource) = %[1]s ]", source, sourceDir))
}

func setClockBack(t *testing.T, ctx context.Context, m running) {
	t.Helper()
	sh(t, ctx, m, fmt.Sprintf("date -s @%d >/dev/null", time.Now().Add(-threeDays).Unix()))
	checkClock(t, ctx, m, "set back", -threeDays, 2*time.Second) // date sets whole seconds
}

const sourceDir = "/sys/devices/system/clocksource/clocksource0/"

func clockSources(t *testing.T, ctx context.Context, st *store.Store, name string) string {
	t.Helper()
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "sources"})
	defer vm.Close()
	return sh(t, ctx, vm, "cat "+sourceDir+"available_clocksource")
}

func testClock(t *testing.T, ctx context.Context, st *store.Store, name, source string) {
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "source"})
	checkClock(t, ctx, vm, "restore", 0, clockTolerance)
	useSource(t, ctx, vm, source)
	setClockBack(t, ctx, vm)
	certificate := startTLS(t, ctx, vm)
	if _, err := handshake(ctx, vm, certificate); err == nil {
		t.Error("guest in the past accepts a new certificate")
	}
	own := openStore(t)
	snapped := time.Now()
	takeSnapshot(t, ctx, vm, own, "old")

	clone := restore(t, ctx, own, "old", forkvm.Config{Name: "clone"})
	checkClock(t, ctx, clone, "restore of an old snapshot", 0, clockTolerance)
	if _, err := handshake(ctx, clone, certificate); err != nil {
		t.Errorf("restore of an old snapshot: %v", err)
	}
	time.Sleep(2 * time.Second)
	checkClock(t, ctx, clone, "some time after a restore", 0, clockTolerance)

	frozen := restore(t, ctx, own, "old", forkvm.Config{Name: "frozen", FrozenTime: true})
	// It goes on from the moment of the snapshot, in which it then ran for less
	// than the time since.
	since := time.Since(snapped)
	checkClock(t, ctx, frozen, "frozen time", -threeDays-since/2, since/2+2*time.Second)

	child := fork(t, ctx, vm, forkvm.Config{Name: "child"})[0]
	checkClock(t, ctx, child, "fork", 0, clockTolerance)
	if _, err := handshake(ctx, child, certificate); err != nil {
		t.Errorf("fork: %v", err)
	}
	checkClock(t, ctx, vm, "source of the fork", -threeDays, 2*time.Second)

	if err := clone.Pause(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(90 * time.Second)
	if err := clone.Resume(); err != nil {
		t.Fatal(err)
	}
	checkClock(t, ctx, clone, "pause of 90 s", 0, clockTolerance)
}

// TestCaseA3 checks that no two clones share anything by which others know them.
func TestCaseA3(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	vms := restoreAll(t, ctx, st, name, clones)
	vms = append(vms, fork(t, ctx, vms[0], forkvm.Config{Name: "child-0"}, forkvm.Config{Name: "child-1"})...)
	for what, script := range map[string]string{
		"hostname":   "hostname",
		"machine id": "cat /etc/machine-id",
		"boot id":    "cat /proc/sys/kernel/random/boot_id",
		"generation": "cat /run/forkvm/generation",
		"uuid":       "cat /proc/sys/kernel/random/uuid",
	} {
		var values []string
		for _, vm := range vms {
			values = append(values, sh(t, ctx, vm, script))
		}
		distinct(t, what, values)
	}
	for i, vm := range vms {
		info, err := vm.Agent().Ping(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if file := sh(t, ctx, vm, "cat /run/forkvm/generation"); info.Generation != file {
			t.Errorf("machine %d: the guest agent has generation %s, its file %s", i, info.Generation, file)
		}
	}
}

// TestCaseA3FailsClosed restores clones whose guest cannot take on a new
// identity: each is an error with the reason, and none is left running.
func TestCaseA3FailsClosed(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)

	_, err := forkvm.Restore(ctx, st, name, config(t, forkvm.Config{Name: strings.Repeat("n", 65)}))
	if !errors.Is(err, &client.Error{Code: proto.CodeInvalidRequest}) {
		t.Errorf("hostname that no Linux takes: %v, want %s", err, proto.CodeInvalidRequest)
	}

	vm := restore(t, ctx, st, name, forkvm.Config{Name: "source"})
	// A directory in its place cannot be covered by a file.
	sh(t, ctx, vm, "umount /etc/machine-id && rm /etc/machine-id && mkdir /etc/machine-id")
	own := openStore(t)
	takeSnapshot(t, ctx, vm, own, "stubborn")
	_, err = forkvm.Restore(ctx, own, "stubborn", config(t, forkvm.Config{Name: "clone"}))
	var unconfirmed *client.UnconfirmedError
	if !errors.As(err, &unconfirmed) || unconfirmed.Items[proto.ItemMachineID] == "" {
		t.Errorf("guest that does not confirm its machine id: %v", err)
	}
	children, err := vm.Fork(ctx, config(t, forkvm.Config{Name: "child"}))
	if !errors.As(err, &unconfirmed) || len(children) != 0 {
		t.Errorf("fork of such a guest: %v, %d children", err, len(children))
	}
	sh(t, ctx, vm, "true") // the source goes on

	// A guest whose agent does not answer in time.
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if vm, err := forkvm.Restore(short, st, name, config(t, forkvm.Config{Name: "late"})); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("restore without enough time: %v", err)
		vm.Close()
	}
}

// TestCaseA7 uses every device in generations 0, 1 and 2.
func TestCaseA7(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	host := newEchoHost(t)
	start := func(st *store.Store, from, name string) (*forkvm.VM, *console) {
		out := newConsole(t, name)
		return restore(t, ctx, st, from, forkvm.Config{Name: name, Console: out, Connect: host.connect}), out
	}
	own := openStore(t)
	vm, out := start(st, name, "generation-0")
	sh(t, ctx, vm, "mkdir -p /var/tmp; setsid guestload -dir /var/tmp/load -memory 1 >/run/guestload.log 2>&1 & true")
	random := []string{}
	for generation := range 3 {
		name := fmt.Sprintf("generation-%d", generation)
		if generation > 0 {
			vm, out = start(own, name, name)
		}
		random = append(random, useDevices(t, ctx, vm, out, name))
		if generation == 2 {
			// A sibling has the same past and other random bytes.
			sibling, out := start(own, name, "sibling")
			random = append(random, useDevices(t, ctx, sibling, out, "sibling"))
			break
		}
		takeSnapshot(t, ctx, vm, own, fmt.Sprintf("generation-%d", generation+1))
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	}
	distinct(t, "bytes of /dev/hwrng", random)
}

// useDevices uses every device of a machine and returns what /dev/hwrng gave.
func useDevices(t *testing.T, ctx context.Context, vm *forkvm.VM, out *console, tag string) string {
	t.Helper()
	sh(t, ctx, vm, "echo console says "+tag+" > /dev/ttyS0")
	for !strings.Contains(out.String(), "console says "+tag) {
		if ctx.Err() != nil {
			t.Fatalf("%s: console output does not come: %q", tag, out)
		}
		time.Sleep(10 * time.Millisecond)
	}
	wrote := sh(t, ctx, vm, "dd if=/dev/urandom of=/root/data bs=64k count=4 conv=fsync 2>/dev/null; sha256sum </root/data")
	if read := sh(t, ctx, vm, "echo 3 > /proc/sys/vm/drop_caches; sha256sum </root/data"); read != wrote {
		t.Errorf("%s: wrote %s to the disk, read %s", tag, wrote, read)
	}
	if err := echo(ctx, vm, 1, 1<<20); err != nil {
		t.Errorf("%s: 1 MiB from host to guest and back: %v", tag, err)
	}
	if sum := sh(t, ctx, vm, fmt.Sprintf("guestload connect -port %d -bytes 1048576", hostPort)); len(sum) != 64 {
		t.Errorf("%s: 1 MiB from guest to host and back: %q", tag, sum)
	}
	bytes := sh(t, ctx, vm, "dd if=/dev/hwrng bs=64 count=16 2>/dev/null | hexdump -v -e '/1 \"%02x\"'")
	if len(bytes) != 2*64*16 {
		t.Errorf("%s: %d hexadecimal digits from /dev/hwrng", tag, len(bytes))
	}
	return bytes
}

// hostPort is where the host echoes for guests.
const hostPort = 7001

// echoHost is what guests connect to on the host.
type echoHost struct{ socket net.Listener }

func newEchoHost(t *testing.T) *echoHost {
	t.Helper()
	socket, err := net.Listen("unix", t.TempDir()+"/echo")
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			conn, err := socket.Accept()
			if err != nil {
				return
			}
			served.Go(func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn) // until the other end breaks or closes
			})
		}
	})
	t.Cleanup(served.Wait)
	t.Cleanup(func() { socket.Close() })
	return &echoHost{socket}
}

// connect is a forkvm.Config.Connect.
func (h *echoHost) connect(ctx context.Context, port uint32) (net.Conn, error) {
	if port != hostPort {
		return nil, fmt.Errorf("nobody serves port %d", port)
	}
	var d net.Dialer
	return d.DialContext(ctx, "unix", h.socket.Addr().String())
}
