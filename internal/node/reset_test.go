package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

// What the VM process has noted of a reset holds, also when whoever asked for it
// did not live to see the end; what came after the reset holds against that.
func TestRecordAfterAReset(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "looper", p.PID(), p.Start())
	first := vm.Life
	first.Identity = machine.NewIdentity("looper", machine.TimeHost)
	if err := vm.change(t.Context(), func(r *Record) error { r.Life = first; return nil }); err != nil {
		t.Fatal(err)
	}

	second := first
	second.Identity = first.Identity.Next()
	second.Snapshot = "step-1"
	second.Origin = Standing{LastSnapshot: "step-1", Lineage: []string{"id-1"}}
	second.Standing = second.Origin
	beginLife(t, vm, second)
	found, err := n.Find("looper")
	if err != nil {
		t.Fatal(err)
	}
	if found.Identity != second.Identity || found.Record.Snapshot != "step-1" || found.LastSnapshot != "step-1" {
		t.Errorf("found %+v, want %+v", found.Life, second)
	}

	// A snapshot that is taken then is on record, and stays.
	taken := Standing{LastSnapshot: "step-2", Lineage: []string{"id-2", "id-1"}}
	if err := found.change(t.Context(), func(r *Record) error { r.Standing = taken; return nil }); err != nil {
		t.Fatal(err)
	}
	if found, err = n.Find("looper"); err != nil {
		t.Fatal(err)
	}
	if found.LastSnapshot != "step-2" || !slices.Equal(found.Lineage, taken.Lineage) || !slices.Equal(found.Origin.Lineage, second.Origin.Lineage) {
		t.Errorf("found %+v", found.Life)
	}
}

// A VM sees what another program has done to it since it last looked.
func TestRecordChangedByOthers(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "shared", p.PID(), p.Start())
	other, err := n.Find("shared")
	if err != nil {
		t.Fatal(err)
	}
	standing := func(name string) Standing { return Standing{LastSnapshot: name, Lineage: []string{name}} }
	for i, name := range []string{"step-1", "step-2", "step-3", "step-4"} {
		writer, reader := vm, other
		if i%2 == 1 {
			writer, reader = other, vm
		}
		if err := writer.change(t.Context(), func(r *Record) error { r.Standing = standing(name); return nil }); err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second time it knows
			var seen Standing
			if err := reader.locked(t.Context(), func(r *Record) error { seen = r.Standing; return nil }); err != nil {
				t.Fatal(err)
			}
			if seen.LastSnapshot != name || reader.LastSnapshot != name {
				t.Errorf("the last snapshot is %q, want %q", seen.LastSnapshot, name)
			}
		}
	}
	life := vm.Life
	life.Snapshot, life.Identity = "step-5", machine.NewIdentity("shared", machine.TimeHost)
	beginLife(t, vm, life)
	if err := vm.locked(t.Context(), func(*Record) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if vm.Record.Snapshot != "step-5" {
		t.Errorf("the VM stands on %q after a reset, want step-5", vm.Record.Snapshot)
	}
}

// beginLife does what a reset leaves on disk: its caller announces the life, and the VM's process notes the generation.
func beginLife(t *testing.T, vm *VM, l Life) {
	t.Helper()
	if err := l.announce(vm.dir, vm.Identity.Generation); err != nil {
		t.Fatal(err)
	}
	note(t, vm, strconv.Quote(l.Identity.Generation))
}

// note replaces what the VM's process has noted of its last reset.
func note(t *testing.T, vm *VM, content string) {
	t.Helper()
	path := process.GenerationPath(vm.dir)
	if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// A VM's process may say which of the lives has begun that were prepared for it. Whatever else it leaves there changes nothing and stops nobody.
func TestProcessLiesAboutItsLife(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "liar", p.PID(), p.Start())
	first := vm.Life
	first.Identity = machine.NewIdentity("liar", machine.TimeHost)
	if err := vm.change(t.Context(), func(r *Record) error { r.Life = first; return nil }); err != nil {
		t.Fatal(err)
	}
	wanted := first
	wanted.Identity = first.Identity.Next()
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte(strconv.Quote(wanted.Identity.Generation)), 0o600); err != nil {
		t.Fatal(err)
	}
	path := process.GenerationPath(vm.dir)
	never := machine.NewIdentity("liar", machine.TimeHost).Generation
	for name, lie := range map[string]func() error{
		"a generation that nobody prepared": func() error { return os.WriteFile(path, []byte(strconv.Quote(never)), 0o600) },
		"a path":                            func() error { return os.WriteFile(path, []byte(`"../../names"`), 0o600) },
		"no JSON":                           func() error { return os.WriteFile(path, []byte("x"), 0o600) },
		"nothing":                           func() error { return os.WriteFile(path, nil, 0o600) },
		"a link":                            func() error { return os.Symlink(outside, path) },
		"a pipe":                            func() error { return unix.Mkfifo(path, 0o600) },
		"a directory":                       func() error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := wanted.announce(vm.dir, first.Identity.Generation); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.RemoveAll(path), lie()); err != nil {
				t.Fatal(err)
			}
			found, err := n.Find("liar")
			if err != nil {
				t.Fatal(err)
			}
			if found.Identity != first.Identity {
				t.Errorf("generation %s, want %s", found.Identity.Generation, first.Identity.Generation)
			}
		})
	}
	note(t, vm, strconv.Quote(wanted.Identity.Generation))
	if found, err := n.Find("liar"); err != nil || found.Identity != wanted.Identity {
		t.Errorf("the life that was prepared has not begun: %+v, %v", found, err)
	}
}

// Of the lives that were announced stay the last one and that which the VM has.
func TestLivesAreRemoved(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "cat", p.PID(), p.Start())
	l := vm.Life
	for range 9 {
		now := vm.Identity.Generation
		l.Identity = l.Identity.Next()
		if err := l.announce(vm.dir, now); err != nil { // a reset that fails
			t.Fatal(err)
		}
		l.Identity = l.Identity.Next()
		beginLife(t, vm, l)
		found, err := n.Find("cat")
		if err != nil {
			t.Fatal(err)
		}
		if vm = found; vm.Identity != l.Identity {
			t.Errorf("generation %s, want %s", vm.Identity.Generation, l.Identity.Generation)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(vm.dir, lifeFiles)); len(left) > 2 {
		t.Errorf("left: %q", left)
	}
}

func TestResetOfAVMThatHasEnded(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "ended", p.PID(), p.Start()+1)
	if _, err := vm.Reset(t.Context(), ResetOptions{}); !failure.Is(err, failure.VMNotRunning) {
		t.Errorf("reset: %v, want %s", err, failure.VMNotRunning)
	}
}
