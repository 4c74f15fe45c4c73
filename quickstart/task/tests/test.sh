#!/bin/sh
# 1 if the hidden tests pass, 0 if one of them fails. Anything else is no verdict.
set -eu

# The database is the environment's and goes on when the policy's processes are ended, unless the policy has started it
# anew: then it ended as one of these, and nobody starts services in a fork.
if ! pg_isready --quiet; then
	version=$(ls /etc/postgresql)
	pg_ctlcluster --skip-systemctl-redirect "$version" main start || true
	until pg_isready --quiet; do sleep 0.2; done
fi

# Nothing from the work tree is loaded into the process that tests: neither its conftest.py nor its pytest.ini, and Python's
# isolated mode keeps out what the environment and user directories would add.
cd /
status=0
python3 -I -m pytest -q -p no:cacheprovider --noconftest -c /tests/pytest.ini --rootdir /tests /tests || status=$?
case $status in
0) echo 1 ;;
1) echo 0 ;;
*) exit "$status" ;;
esac >/logs/verifier/reward.txt
