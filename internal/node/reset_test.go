package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

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
	note, err := json.Marshal(second)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(vm.dir, process.LifeFile), note, 0o600); err != nil {
		t.Fatal(err)
	}
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
	note, err := json.Marshal(life)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(vm.dir, process.LifeFile), note, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := vm.locked(t.Context(), func(*Record) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if vm.Record.Snapshot != "step-5" {
		t.Errorf("the VM stands on %q after a reset, want step-5", vm.Record.Snapshot)
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
