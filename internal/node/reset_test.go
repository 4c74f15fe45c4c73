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

func TestResetOfAVMThatHasEnded(t *testing.T) {
	n := open(t)
	p := running(t)
	vm := record(t, n, "ended", p.PID(), p.Start()+1)
	if _, err := vm.Reset(t.Context(), ResetOptions{}); !failure.Is(err, failure.VMNotRunning) {
		t.Errorf("reset: %v, want %s", err, failure.VMNotRunning)
	}
}
