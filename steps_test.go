package forkvm_test

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/snapshot/store"
)

// TestGuestRunsWhileItsSnapshotIsStored: the pause is over before the first byte
// goes to storage, and a failure there, at whichever step (case G1), leaves the
// guest running, nothing listed and nothing behind.
func TestGuestRunsWhileItsSnapshotIsStored(t *testing.T) {
	ctx := begin(t)
	parents, name := parent(t, ctx, 1)
	vm := restore(t, ctx, parents, name, forkvm.Config{Name: "source"})
	sh(t, ctx, vm, "head -c 1000000 /dev/urandom > /run/data; head -c 1000000 /dev/urandom > /root/data; sync")

	failAt, step := -1, 0
	var steps []string
	st, err := store.OpenWith(store.Config{Path: t.TempDir(), Before: func(what, file string) error {
		step++
		if failAt < 0 {
			steps = append(steps, what)
			if out, err := attempt(ctx, vm, "echo runs"); err != nil || out != "runs" {
				t.Errorf("before %s %s: %q, %v", what, file, out, err)
			}
		}
		if step-1 == failAt {
			return unix.EIO
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	takeSnapshot(t, ctx, vm, st, "first")
	if !slices.Contains(steps, "write") || !slices.Contains(steps, "rename") {
		t.Errorf("steps: %v", steps)
	}

	for failAt = range steps {
		sh(t, ctx, vm, "head -c 100000 /dev/urandom > /run/data; head -c 100000 /dev/urandom > /root/data; sync")
		step = 0
		_, err := vm.Snapshot(ctx, st, "second")
		if step <= failAt { // later snapshots have fewer files to write than the first
			if err != nil {
				t.Error(err)
			}
			break
		}
		if !errors.Is(err, unix.EIO) {
			t.Errorf("step %d (%s): %v", failAt, steps[failAt], err)
		}
		if names, err := st.Names(); err != nil || !slices.Equal(names, []string{"first"}) {
			t.Errorf("step %d: listed: %v, %v", failAt, names, err)
		}
		if left, _ := filepath.Glob(filepath.Join(st.Path(), "tmp", "*")); len(left) > 0 {
			t.Errorf("step %d: left: %v", failAt, left)
		}
	}
	failAt = -2
	sh(t, ctx, vm, "true")
	if names, _ := st.Names(); !slices.Contains(names, "second") {
		takeSnapshot(t, ctx, vm, st, "second")
	}
	checkAll(t, ctx, st)
	again := restore(t, ctx, st, "second", forkvm.Config{Name: "again"})
	if got, want := sh(t, ctx, again, "sha256sum /run/data /root/data"), sh(t, ctx, vm, "sha256sum /run/data /root/data"); got != want {
		t.Errorf("the clone has %s, want %s", got, want)
	}
}

func checkAll(t *testing.T, ctx context.Context, st *store.Store) {
	t.Helper()
	names, err := st.Names()
	if err != nil {
		t.Fatal(err)
	}
	v := new(store.Verification)
	for _, name := range names {
		s, err := st.Open(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if err := errors.Join(v.Check(ctx, s), s.Close()); err != nil {
			t.Error(err)
		}
	}
}
