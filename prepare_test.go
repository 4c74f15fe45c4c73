package forkvm_test

import (
	"strings"
	"testing"

	"github.com/forkvm/forkvm"
)

func TestPreparedMachine(t *testing.T) {
	ctx := begin(t)
	prepare := func(cpus int) *forkvm.Prepared {
		p, err := forkvm.Prepare(cpus)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	st, name := parent(t, ctx, 1)
	fits, other, unused := prepare(1), prepare(2), prepare(0)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "ahead", Prepared: fits})
	if got := sh(t, ctx, vm, "hostname; nproc"); got != "ahead\n1" {
		t.Errorf("guest says %q", got)
	}
	// It is used up, and the next machine makes its own.
	child := fork(t, ctx, vm, forkvm.Config{Name: "child", Prepared: fits})[0]
	if got := sh(t, ctx, child, "hostname"); got != "child" {
		t.Errorf("child says %q", got)
	}
	if _, err := forkvm.Restore(ctx, st, name, config(t, forkvm.Config{Prepared: other})); err == nil || !strings.Contains(err.Error(), "vCPU") {
		t.Errorf("with another number of vCPUs: %v", err)
	}
	for range 2 {
		if err := unused.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}
