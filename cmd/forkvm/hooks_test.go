package main

import (
	"strings"
	"testing"
)

// A clone runs what its parent has in /etc/forkvm/resume.d before anything else, and
// does not come into being if that fails. A snapshot waits for what it is told to.
func TestHooksAndReadiness(t *testing.T) {
	h := newHost(t, "")
	h.start("parent")
	h.sh("parent", `mkdir -p /etc/forkvm/resume.d
printf '#!/bin/sh\necho $FORKVM_GENERATION $(hostname) >>/run/hooks\n' >/etc/forkvm/resume.d/10-note
chmod +x /etc/forkvm/resume.d/10-note`)
	h.must("exec", "-d", "parent", "--", "sh", "-c", "sleep 0.3; touch /run/up")
	h.refused("guest_not_ready", "snapshot", "parent", "early", "--ready", "file:/run/never", "--ready-timeout", "100ms")
	h.must("snapshot", "parent", "hooked", "--ready", "file:/run/up", "--ready", "command:test -e /run/up")
	h.must("create", slowly, "--snapshot", "hooked", "--name", "clone")
	if got, want := h.sh("clone", "cat /run/hooks"), h.inspect("clone").Generation+" clone"; got != want {
		t.Errorf("the clone's hook wrote %q, want %q", got, want)
	}
	if r := h.forkvm("exec", "parent", "--", "cat", "/run/hooks"); r.code == 0 {
		t.Errorf("the parent ran its hook: %v", r)
	}
	h.sh("parent", `printf '#!/bin/sh\necho no lease\nexit 1\n' >/etc/forkvm/resume.d/10-note`)
	h.must("snapshot", "parent", "broken")
	r := h.forkvm("create", slowly, "--snapshot", "broken", "--name", "never", "-o", "json")
	if r.code == 0 || !strings.Contains(r.stderr, `"identity_unconfirmed"`) || !strings.Contains(r.stderr, "no lease") {
		t.Error(r)
	}
	// Limits hold for a command of a protected guest agent, too, and of another user.
	if got := h.must("exec", "--ulimit", "nofile=64", "-u", "user", "clone", "--", "sh", "-c", "ulimit -n; cat /proc/self/oom_score_adj"); got != "64\n0\n" {
		t.Errorf("limit and score of a command: %q", got)
	}
	if got := h.must("stats", "-o", "jsonl", "clone"); !strings.Contains(got, `"protected":true`) {
		t.Errorf("stats of the clone: %s", got)
	}
}
