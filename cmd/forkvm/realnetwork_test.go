package main

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
)

// realNetwork is real software in a guest with a card: a Debian with PostgreSQL and git, in a world that serves packages and a
// repository.
type realNetwork struct {
	*host
	files string // of the world's web servers
}

// worker is the VM that uses the network, database one that serves.
const (
	worker   = "worker"
	database = "database"
)

// aptInstall has the package manager install from one server only.
const aptInstall = `rm -rf /etc/apt/sources.list.d /var/lib/apt/lists/*
echo "deb [trusted=yes] http://$server/ ./" >/etc/apt/sources.list
{ apt-get -q -o APT::Update::Error-Mode=any update && DEBIAN_FRONTEND=noninteractive apt-get -q -y install nftables kmod; } >&2 &&
dpkg-query -W -f '${Status}' nftables`

// bridge is the network that Docker makes for containers: a bridge of their own, whose addresses are translated on the way out.
const bridge = `set -e
depmod -a
modprobe -a bridge veth nft_chain_nat nft_masq
ip link add docker0 type bridge
ip addr add 172.17.0.1/16 dev docker0
ip link set docker0 up
mkdir -p /run/netns
ip netns add box
ip link add veth0 type veth peer name eth0 netns box
ip link set veth0 master docker0 up
ip -n box addr add 172.17.0.2/16 dev eth0
ip -n box link set eth0 up
ip -n box route add default via 172.17.0.1
sysctl -qw net.ipv4.ip_forward=1
nft add table ip nat
nft 'add chain ip nat postrouting { type nat hook postrouting priority srcnat; }'
nft 'add rule ip nat postrouting ip saddr 172.17.0.0/16 oifname != "docker0" masquerade'`

// TestRealNetwork: Debian's package manager, git, PostgreSQL's client, and what runs behind a bridge with address translation, work
// with what a policy allows, and are refused what is beside it.
func TestRealNetwork(t *testing.T) {
	testkit.Long(t)
	data, _ := testkit.RequireEnvironment(t)
	r := &realNetwork{files: t.TempDir()}
	if err := os.CopyFS(r.files, os.DirFS(testkit.RequireMirror(t))); err != nil {
		t.Fatal(err)
	}
	startWorldWith(t, r.files)
	r.host = newHost(t, data)
	r.must("create", slowly, "--name", worker, "--memory", "768M", "--ready", "unit:postgresql.service",
		"--allow", "deb.good.test:80", "--allow", "git.good.test:443", "ledger")
	r.must("snapshot", worker, "networked", "--task", "ledger")
	for _, part := range []struct {
		name string
		run  func(*realNetwork)
	}{{"apt", (*realNetwork).installs}, {"git", (*realNetwork).clones}, {"bridge", (*realNetwork).bridges}, {"postgresql", (*realNetwork).queries}} {
		t.Run(part.name, func(t *testing.T) {
			h := *r.host
			h.t = t
			part.run(&realNetwork{&h, r.files})
		})
	}
}

// denied has the worker do what has to fail, with this on record.
func (r *realNetwork) denied(script, record, reason string) {
	r.t.Helper()
	if got := r.forkvm("exec", worker, "--", "sh", "-c", script); got.code == 0 {
		r.t.Errorf("not refused: %v", got)
	}
	shown := r.network(worker).Refusals
	for _, f := range shown {
		if f.is(record) && f.Reason == reason {
			return
		}
	}
	r.t.Errorf("%s is not on record of %q: %+v", reason, record, shown)
}

func (r *realNetwork) installs() {
	r.t.Helper()
	if got := r.sh(worker, "server=deb.good.test; "+aptInstall); got != "install ok installed" {
		r.t.Errorf("apt-get install: %q", got)
	}
	r.denied("server=deb.other.test; "+aptInstall, "dns deb.other.test", "not_allowed")
}

func (r *realNetwork) clones() {
	r.t.Helper()
	r.sh(worker, "git config --system --add safe.directory '*' && git clone -q --bare "+realProject+" /root/ledger.git && git -C /root/ledger.git update-server-info")
	r.must("cp", worker+":/root/ledger.git", filepath.Join(r.files, "ledger.git"))
	r.must("cp", filepath.Join(r.files, "certificate.pem"), worker+":/etc/ssl/certs/ca-certificates.crt")
	const clone = "rm -rf /root/clone; git "
	want := r.sh(worker, "git -C /root/ledger.git log --oneline")
	if got := r.sh(worker, clone+"clone -q https://git.good.test/ledger.git /root/clone && git -C /root/clone log --oneline"); got != want || got == "" {
		r.t.Errorf("git clone has %q, want %q", got, want)
	}
	r.denied(clone+"clone -q https://git.other.test/ledger.git /root/clone", "dns git.other.test", "not_allowed")
	// The server's address is known, and allowed by the other name only.
	r.denied(clone+"-c http.curloptResolve=git.other.test:443:"+worldAddress+" clone -q https://git.other.test/ledger.git /root/clone",
		"tcp "+worldAddress+":443", "wrong_name")
}

func (r *realNetwork) bridges() {
	r.t.Helper()
	// The guest's kernel is this machine's, too.
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		r.t.Fatal(err)
	}
	release := unix.ByteSliceToString(name.Release[:])
	if got := r.sh(worker, "mkdir -p /usr/lib/modules && uname -r"); got != release {
		r.t.Fatalf("the guest's kernel is %s, this one %s", got, release)
	}
	r.must("cp", filepath.Join("/usr/lib/modules", release), worker+":/usr/lib/modules/"+release)
	r.sh(worker, bridge)
	const get = "ip netns exec box python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read(8).decode())' "
	if got := r.sh(worker, get+"http://deb.good.test/Packages"); got != "Package:" {
		r.t.Errorf("behind the bridge: %q", got)
	}
	r.denied(get+"http://deb.other.test/Packages", "dns deb.other.test", "not_allowed")
	r.denied(get+"http://20.1.1.1/Packages", "tcp 20.1.1.1:80", "not_allowed")
	r.denied(get+"http://169.254.169.254/Packages", "tcp 169.254.169.254:80", "special_address")
	// Without the translation it is not the guest that speaks.
	r.denied("nft flush ruleset; "+get+"http://"+worldAddress+"/Packages", "tcp 172.17.0.2", "forged")
}

func (r *realNetwork) queries() {
	r.t.Helper()
	at := hostAddress + ":15432"
	r.must("restore", slowly, "--name", database, "--network", "no-network", "--publish", at+":5432", "networked")
	r.sh(database, `set -e
psql -qAt -c "ALTER SYSTEM SET listen_addresses = '*'" ledger
echo 'host ledger root 10.0.2.2/32 trust' >>$(ls -d /etc/postgresql/*/main)/pg_hba.conf
systemctl restart 'postgresql@*'
until psql -qAt -c 'SELECT 1' ledger; do sleep 0.2; done >/dev/null 2>&1`)
	r.must("network", "set", worker, "allowlist", "--allow", at)
	r.serve(hostAddress + ":15433")
	const sum = "psql -w -h " + hostAddress + " -U root -qAt -c 'SELECT sum(balance) FROM accounts' -p "
	if got := r.sh(worker, sum+"15432 ledger"); got != "12500" {
		r.t.Errorf("the database says %q", got)
	}
	r.denied(sum+"15433 ledger", "tcp "+hostAddress+":15433", "special_address")
	// It listens in the worker, too, where nobody has published it.
	r.denied(sum+"5432 ledger", "tcp "+hostAddress+":5432", "special_address")
}
