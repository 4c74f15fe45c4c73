package machine

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// rehearsed is a clone of a checkpoint that has rehearsed. What it sent meanwhile its network of then has heard, and has ended.
func rehearsed(t *testing.T, ctx context.Context, c *Checkpoint) *Machine {
	t.Helper()
	life := NewIdentity("thrown-away", TimeHost)
	m := clone(t, c, life)
	before := m.network
	if err := m.Rehearse(ctx, life, newTops(t, m)); err != nil {
		t.Fatal(err)
	}
	if before != nil && (!before.(*ears).closed || m.network != nil) {
		t.Error("the network of the life that was thrown away is still there")
	}
	return m
}

// telling has a guest say its hostname on its console whenever that is another one. It
// looks a hundred times a second.
const telling = `mkfifo /tmp/never; while :; do read now </proc/sys/kernel/hostname
[ "$now" = "$before" ] || echo "i am $now"; before=$now; read -t 0.01 nothing <>/tmp/never; done </dev/null >/dev/ttyS0 2>&1 &`

// identities are what no two clones may share, one a line.
const identities = `cat /proc/sys/kernel/random/boot_id /etc/machine-id /run/forkvm/generation; head -c 16 /dev/urandom | sha256sum`

// perform begins the life of a machine that has rehearsed, and returns what it says on its
// console until it has said its name.
func perform(t *testing.T, ctx context.Context, m *Machine, r Role) string {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "console"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	if r.Console, err = NewConsoleLog(file); err != nil {
		t.Fatal(err)
	}
	var c Config
	c.Shape = m.Shape()
	plug(t, &c, r.Identity)
	r.Network, r.MAC = c.Network, c.MAC
	if err := m.Perform(ctx, r); err != nil {
		t.Fatal(err)
	}
	for ctx.Err() == nil {
		said, err := os.ReadFile(file.Name())
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(said), "i am "+r.Identity.Hostname) {
			return string(said)
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal(context.Cause(ctx))
	return ""
}

// clocks are the guest's uptime and time of day, in seconds.
func clocks(t *testing.T, ctx context.Context, m *Machine) (up, now float64) {
	t.Helper()
	if _, err := fmt.Sscan(run(t, ctx, m, "cut -d' ' -f1 /proc/uptime; date +%s"), &up, &now); err != nil {
		t.Fatal(err)
	}
	return up, now
}

// checkCard: the card is that of the machine's identity, also to a guest that begins its network anew, and nothing was sent by another.
func checkCard(t *testing.T, ctx context.Context, m *Machine, id Identity) {
	t.Helper()
	run(t, ctx, m, "ping -c 1 -W 1 10.0.2.2 || ip link set eth0 down && ip link set eth0 up")
	if got := run(t, ctx, m, "cat /sys/class/net/eth0/address"); got != id.MAC {
		t.Errorf("the card is %s, not %s", got, id.MAC)
	}
	card, err := id.CardAddress()
	if err != nil {
		t.Fatal(err)
	}
	status, err := m.NetworkStatus()
	if err != nil {
		t.Fatal(err)
	}
	own, all := m.network.(*ears).from(card)
	if own == 0 || own != all || own < status.Card.Sent {
		t.Errorf("the network has heard %d frames of the guest, of %d; the card says %d", own, all, status.Card.Sent)
	}
}

// TestRehearse: what a machine has rehearsed nobody finds in it, and its life is that of
// a new clone, however long it has waited.
func TestRehearse(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	for name, mtu := range map[string]int{"without a card": 0, "with a card": DefaultMTU} {
		t.Run(name, func(t *testing.T) {
			testkit.NoLeaks(t)
			testRehearse(t, mtu)
		})
	}
}

func testRehearse(t *testing.T, mtu int) {
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	source := bootSize(t, ctx, Size{CPUs: 1, MemoryBytes: judgeMemory, NetworkMTU: mtu})
	run(t, ctx, source, "sync; "+telling)
	origin := take(t, source)
	if err := source.Close(); err != nil {
		t.Fatal(err)
	}
	// Some processes have ended already in one clone, and not yet in another.
	seen := listing[strings.Index(listing, "\n")+1:]
	id := NewIdentity("clone", TimeFrozen)
	fresh := clone(t, origin, id)
	bring(t, ctx, fresh, id)
	up, now := clocks(t, ctx, fresh)
	want, others := run(t, ctx, fresh, seen), run(t, ctx, fresh, identities)
	run(t, ctx, fresh, "echo step | tee /root/step >/dev/shm/step; sync")
	step := take(t, fresh)
	if err := fresh.Close(); err != nil {
		t.Fatal(err)
	}

	m, second := rehearsed(t, ctx, origin), rehearsed(t, ctx, origin)
	ramOf(t, m).compare(t, "memory", laidOver(t, origin.Memory, judgeMemory))
	diskOf(t, m).compare(t, "disk", laidOver(t, origin.Disks[0], m.Shape().Disks[0].Size))
	const waited = 100 * time.Second
	time.Sleep(waited)
	id = NewIdentity("clone", TimeFrozen)
	said := perform(t, ctx, m, Role{Target: Target{Identity: id}})
	if all := said + strings.Join(m.ConsoleTail(), "\n"); strings.Contains(all, "thrown-away") {
		t.Errorf("its console says what it has rehearsed: %q", all)
	}
	if u, n := clocks(t, ctx, m); math.Abs(u-up) > waited.Seconds()/2 || math.Abs(n-now) > waited.Seconds()/2 {
		t.Errorf("uptime and time are %v and %v, not %v and %v: the guest has waited, too", u, n, up, now)
	}
	if got := run(t, ctx, m, seen); got != want {
		t.Errorf("guest sees\n%s\na new clone sees\n%s", got, want)
	}
	if mtu != 0 {
		checkCard(t, ctx, m, id)
	}

	perform(t, ctx, second, Role{Target: Target{Identity: NewIdentity("second", TimeHost)}})
	if _, n := clocks(t, ctx, second); math.Abs(n-float64(time.Now().Unix())) > waited.Seconds()/2 {
		t.Errorf("the time is %v, not the host's", n)
	}
	had := map[string]bool{}
	for _, line := range strings.Fields(others + "\n" + run(t, ctx, m, identities) + "\n" + run(t, ctx, second, identities)) {
		if had[line] && line != "-" {
			t.Errorf("two clones have %s", line)
		}
		had[line] = true
	}

	// It can begin somewhere else, too: as a child of another clone.
	child := rehearsed(t, ctx, origin)
	perform(t, ctx, child, Role{Target: target(t, child, NewIdentity("child", TimeHost), step)})
	if got := run(t, ctx, child, "hostname; cat /root/step /dev/shm/step"); got != "child\nstep\nstep" {
		t.Errorf("a child sees %q", got)
	}

	if err := m.Perform(ctx, Role{Target: Target{Identity: id}}); err == nil {
		t.Error("a machine has begun twice")
	}
	run(t, ctx, m, "true")
}
