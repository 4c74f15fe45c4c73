package main

import (
	"strings"
	"testing"
)

// A detached command is part of its VM: a snapshot, a fork and what they are made
// into have it running, with what it has written, under its id. A reset takes it
// back to where it was.
func TestDetachedCommandsAreCloned(t *testing.T) {
	h := newHost(t, "")
	h.start("first")
	const script = `i=0; while [ ! -e /run/stop ]; do i=$((i+1)); echo $i; sleep 0.05; done; exit 5`
	id := strings.TrimSpace(h.must("exec", "-d", "first", "--", "sh", "-c", script))
	begins := func(vm string) {
		t.Helper()
		h.eventually("output in "+vm, func() bool {
			return strings.HasPrefix(h.must("logs", "--command", id, vm), "1\n2\n3\n")
		})
	}
	begins("first")
	h.must("snapshot", "first", "busy")
	h.must("create", slowly, "--snapshot", "busy", "--name", "second")
	h.must("fork", "first", "--name", "third")
	for _, vm := range []string{"second", "third"} {
		begins(vm)
		if got := h.must("exec", "--list", "-o", "name", vm); strings.TrimSpace(got) != id {
			t.Errorf("%s has the commands %q, want %s", vm, got, id)
		}
	}
	h.must("exec", "second", "--", "touch", "/run/stop")
	r := h.forkvm("exec", "--attach", id, "second")
	if r.code != 5 || !strings.HasPrefix(r.stdout, "1\n2\n3\n") {
		t.Error(r)
	}
	// Its copies know nothing of that.
	for _, vm := range []string{"first", "third"} {
		if got := h.must("exec", "--list", vm); !strings.Contains(got, "running") {
			t.Errorf("in %s: %s", vm, got)
		}
	}
	h.must("reset", "second", slowly)
	if got := h.must("exec", "--list", "second"); !strings.Contains(got, "running") {
		t.Errorf("after the reset: %s", got)
	}
	h.must("kill", "--command", id, "second")
	if got := strings.TrimSpace(h.must("wait", "--command", id, "second")); got != "137" {
		t.Errorf("killed, it ends with %s", got)
	}
}
