#!/bin/sh
set -eu
cd /srv/ledger
git apply /solution/fix.patch
