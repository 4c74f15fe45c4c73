#!/bin/sh
# Build the quickstart's root file system: Debian 12 with systemd, PostgreSQL, git, Python and the ledger project.
#
#   rootfs.sh [CACHE_DIRECTORY]
#
# Prints the path of the finished tar on stdout; everything else goes to stderr. The tar is kept in the cache directory under
# a key made of everything in this directory that goes into it, so a second call is a look-up. Packages come from wherever
# this machine's own apt gets Debian 12 from. Runs as root, or as a user who may make user namespaces (package uidmap).
set -eu
umask 022

suite=bookworm
here=$(cd "$(dirname "$0")" && pwd)
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/forkvm/quickstart}

say() { echo "rootfs.sh: $*" >&2; }
die() { say "$*"; exit 1; }

# packages lists the package names, comma separated.
packages() { sed -e 's/#.*//' "$here/packages" | tr -s ' \n' '\n\n' | sed '/^$/d' | paste -sd, -; }

# inputs prints the content of everything that decides what the tar holds. File modes count: they end up in the guest.
inputs() {
	cd "$here"
	cat rootfs.sh packages provision.sh
	find project overlay -name __pycache__ -prune -o -name .pytest_cache -prune -o -type f -print | LC_ALL=C sort | while read -r f; do
		stat -c '%a %n' "$f"
		cat "$f"
	done
}

# sources prints this machine's apt sources for the suite, as one-line entries. Asking apt itself covers every format and place
# in which they may be written down, and a name such as "stable" for the suite.
sources() {
	apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' |
		awk -v suite="$suite" '$2 == suite || $2 == suite "-updates" || $2 == suite "-security" { print "deb", $1, $2, $3 }' |
		LC_ALL=C sort -u
}

# proxies prints mmdebstrap options that hand on how this machine's apt reaches its mirrors.
proxies() {
	apt-config dump 2>/dev/null | grep -E '^Acquire::(http|https)::(Proxy|Verify-Peer|CAInfo)' | sed -e "s/^/--aptopt=/" || true
}

mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
key=$(inputs | sha256sum | cut -c1-16)
tar=$cache/rootfs-$key.tar
if [ -s "$tar" ]; then
	echo "$tar"
	exit 0
fi

command -v mmdebstrap >/dev/null || die "build root file system: mmdebstrap is not installed (apt-get install mmdebstrap)"
if [ "$(id -u)" = 0 ]; then
	mode=root
else
	mode=unshare
	command -v newuidmap >/dev/null || die "build root file system as user $(id -un): newuidmap is not installed (apt-get install uidmap)"
	grep -q "^$(id -un):" /etc/subuid || die "build root file system: /etc/subuid has no range for user $(id -un)"
fi
work=$(mktemp -d "$cache/.rootfs-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
chmod 755 "$work"

sources >"$work/sources.list"
[ -s "$work/sources.list" ] || die "build root file system: apt on this machine has no source for $suite (run apt-get update first)"

# The overlay's files belong to root in the guest, whoever checked them out here, and directories that are there stay as they are.
lay="tar -C '$here/overlay' --owner=0 --group=0 --mode=u=rwX,go=rX -cf - . | tar -C \"\$1\" --no-overwrite-dir -xpf -"

say "building $tar (Debian $suite, mode $mode)"
# Documentation, translations and PostgreSQL's compiler for queries (150 MB) are left out: nothing in the guest uses them.
IFS='
'
# shellcheck disable=SC2046 # one option a line
LANG=C.UTF-8 LC_ALL=C.UTF-8 SOURCE_DATE_EPOCH=1735689600 mmdebstrap \
	--mode="$mode" --variant=apt --architectures=amd64 \
	--include="$(packages)" \
	$(proxies) \
	--aptopt='Apt::Install-Recommends "false"' \
	--dpkgopt='path-exclude=/usr/share/doc/*' \
	--dpkgopt='path-exclude=/usr/share/doc-base/*' \
	--dpkgopt='path-exclude=/usr/share/i18n/*' \
	--dpkgopt='path-exclude=/usr/share/info/*' \
	--dpkgopt='path-exclude=/usr/share/lintian/*' \
	--dpkgopt='path-exclude=/usr/share/locale/*' \
	--dpkgopt='path-exclude=/usr/share/man/*' \
	--dpkgopt='path-exclude=/usr/lib/postgresql/*/lib/bitcode/*' \
	--dpkgopt='path-exclude=/usr/lib/postgresql/*/lib/llvmjit*' \
	--dpkgopt='path-exclude=/usr/lib/x86_64-linux-gnu/libLLVM*' \
	--dpkgopt='path-exclude=/usr/lib/x86_64-linux-gnu/libz3*' \
	--customize-hook="copy-in '$here/project' /srv" \
	--customize-hook="$lay" \
	--customize-hook="'$here/provision.sh' \"\$1\"" \
	"$suite" "$work/rootfs.tar" - <"$work/sources.list" >"$work/log" 2>&1 || {
	tail -n 60 "$work/log" >&2
	die "build root file system: mmdebstrap failed (its last lines are above)"
}
unset IFS

sync "$work/rootfs.tar"
mv "$work/rootfs.tar" "$tar"
# Older builds are of no use to anyone any more.
find "$cache" -maxdepth 1 -name 'rootfs-*.tar' ! -name "rootfs-$key.tar" -delete
echo "$tar"
