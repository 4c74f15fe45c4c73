#!/bin/sh
# Turn a freshly unpacked Debian into the quickstart's machine. mmdebstrap calls it with the root directory, when the packages are
# installed and project/ and overlay/ are copied in.
set -eu
root=$1

# inside runs a command in the new root; as runs it there as a user.
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root "$@"; }
as() { user=$1; shift; inside runuser -u "$user" -- "$@"; }

# --- what the guest's user works on -------------------------------------------------------------------------------------
inside useradd --create-home --shell /bin/bash --uid 1000 dev
mv "$root/srv/project" "$root/srv/ledger"
find "$root/srv/ledger" \( -name __pycache__ -o -name .pytest_cache \) -prune -exec rm -rf {} +
inside chown -R dev:dev /srv/ledger
inside chmod -R u=rwX,go=rX /srv/ledger

# commit DAY MESSAGE FILE... records one step of the project's history.
commit() {
	day=$1 message=$2
	shift 2
	as dev git -C /srv/ledger add -- "$@"
	as dev env GIT_AUTHOR_DATE="2025-01-${day}T09:00:00Z" GIT_COMMITTER_DATE="2025-01-${day}T09:00:00Z" \
		git -C /srv/ledger commit --quiet -m "$message"
}
as dev env HOME=/home/dev git config --file /home/dev/.gitconfig user.name 'Ledger Developer'
as dev git config --file /home/dev/.gitconfig user.email dev@ledger.example
as dev git config --file /home/dev/.gitconfig init.defaultBranch main
# Commands that come in as root look into the same repository.
inside git config --system --add safe.directory /srv/ledger
HOME_DEV=/home/dev
as() { user=$1; shift; inside runuser -u "$user" -- env HOME="$HOME_DEV" "$@"; }
as dev git init --quiet --template= /srv/ledger
commit 06 'accounts: keep balances in PostgreSQL' \
	README.md .gitignore pytest.ini schema.sql ledger/__init__.py ledger/database.py ledger/accounts.py tests/conftest.py tests/test_accounts.py
commit 08 'transfers: move money between accounts' ledger/transfers.py tests/test_transfers.py
commit 13 'statement: list what happened to an account' ledger/statement.py tests/test_statement.py
commit 15 'command line: open, transfer, accounts, statement' ledger/__main__.py
[ -z "$(as dev git -C /srv/ledger status --porcelain)" ] || { echo "provision.sh: project has files that no commit names" >&2; exit 1; }

# --- PostgreSQL: a role and a database for the user ------------------------------------------------------------------------
HOME_DEV=/var/lib/postgresql
version=$(ls "$root/etc/postgresql")
cp "$root/usr/local/share/quickstart/postgresql.conf" "$root/etc/postgresql/$version/main/conf.d/quickstart.conf"
rm -r "$root/usr/local/share/quickstart"
inside pg_ctlcluster "$version" main start
as postgres createuser --createdb dev
as postgres createuser --superuser root
as postgres createdb --owner dev ledger
HOME_DEV=/home/dev
as dev psql --quiet --set ON_ERROR_STOP=1 --file /srv/ledger/schema.sql ledger
as dev psql --quiet --set ON_ERROR_STOP=1 --command "INSERT INTO accounts (name, balance) VALUES ('alice', 10000), ('bob', 2500), ('carol', 0)" ledger
as dev psql --quiet --command 'VACUUM ANALYZE' ledger
inside pg_ctlcluster "$version" main stop
rm -f "$root"/var/log/postgresql/*

# --- a short, quiet boot: nobody logs in on a console, nothing runs by the calendar, no hardware comes and goes -----------------
inside systemctl set-default --quiet multi-user.target
inside systemctl mask --quiet \
	apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer systemd-tmpfiles-clean.timer \
	getty.target getty-static.service console-getty.service \
	systemd-ask-password-console.path systemd-ask-password-wall.path systemd-initctl.socket \
	systemd-logind.service user.slice systemd-update-utmp.service systemd-update-utmp-runlevel.service \
	systemd-firstboot.service systemd-machine-id-commit.service systemd-pstore.service systemd-binfmt.service \
	modprobe@.service systemd-modules-load.service systemd-remount-fs.service systemd-random-seed.service \
	systemd-journal-flush.service systemd-journald-audit.socket systemd-repart.service \
	cryptsetup.target integritysetup.target veritysetup.target remote-fs.target \
	proc-sys-fs-binfmt_misc.automount dev-hugepages.mount dev-mqueue.mount \
	sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount
# There is nothing to generate units from either; the one unit that a generator would bring is linked by hand.
mkdir -p "$root/etc/systemd/system-generators" "$root/etc/systemd/system/postgresql.service.wants"
for generator in "$root"/lib/systemd/system-generators/*; do
	ln -s /dev/null "$root/etc/systemd/system-generators/${generator##*/}"
done
ln -s "/lib/systemd/system/postgresql@.service" "$root/etc/systemd/system/postgresql.service.wants/postgresql@$version-main.service"
sed -i "s/@VERSION@/$version/g" "$root/etc/systemd/system/postgresql@.service.d/quickstart.conf"

# --- nothing in the image may identify one machine ----------------------------------------------------------------------------
: >"$root/etc/machine-id"
rm -f "$root/etc/hostname" "$root/etc/resolv.conf" "$root/var/lib/dbus/machine-id" "$root/var/lib/systemd/random-seed"
rm -f "$root/etc/ssl/private/ssl-cert-snakeoil.key" "$root/etc/ssl/certs/ssl-cert-snakeoil.pem"
rm -rf "$root/var/log/journal"
printf '127.0.0.1\tlocalhost\n::1\tlocalhost\n' >"$root/etc/hosts"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/cache/debconf/*-old "$root"/var/log/apt "$root"/var/log/*.log

# Otherwise systemd takes the first boot for one after an upgrade and rebuilds its caches.
touch -r "$root/usr" "$root/etc/.updated" "$root/var/.updated"
