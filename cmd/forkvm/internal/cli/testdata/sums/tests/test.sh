#!/bin/sh
[ "$(cat answer)" = 42 ]
echo $((! $?)) >/logs/verifier/reward.txt
