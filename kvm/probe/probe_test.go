package probe

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/kvm"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func open(t *testing.T) *kvm.System {
	t.Helper()
	if testkit.InLab() {
		testkit.RequireKVM(t)
	}
	sys, err := kvm.Open()
	if err != nil {
		testkit.Require(t, "kvm", err.Error())
	}
	t.Cleanup(func() { sys.Close() })
	return sys
}

// Whatever the device is, there is an answer, soon, and a consistent one.
func TestRun(t *testing.T) {
	sys := open(t)
	start := time.Now()
	report, err := Run(context.Background(), sys)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%v, %.1e instructions/s", time.Since(start), report.Speed)
	for _, r := range report.Results {
		t.Logf("%-20s %v", r.Instruction, r.Err)
	}
	if len(report.Results) != len(programs()) {
		t.Errorf("%d results of %d", len(report.Results), len(programs()))
	}
	if report.OK() != (report.Err() == nil) {
		t.Errorf("ok %v, error %v", report.OK(), report.Err())
	}
	if !report.OK() && testkit.InLab() {
		t.Errorf("in the lab: %v", report.Err())
	}
}

func TestRunCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Run(ctx, open(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A guest that does not stop is stopped.
func TestEndlessProgram(t *testing.T) {
	sys := open(t)
	cpuid, err := sys.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	m, err := newMachine(sys, cpuid, program{code: []byte{0xeb, 0xfe}}) // jmp $
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, stuck, err := m.execute(ctx)
	if stuck || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stuck %v, %v", stuck, err)
	}
}

func TestReport(t *testing.T) {
	bad := Report{Results: []Result{{Instruction: "good"}, {Instruction: "int3", Err: errors.New("x")}, {Instruction: "iretq", Err: errors.New("y")}}}
	if bad.OK() || len(bad.Failed()) != 2 {
		t.Errorf("%+v", bad)
	}
	var unusable *UnusableError
	if err := bad.Err(); !errors.As(err, &unusable) || unusable.Fix() == "" ||
		err.Error() != "kvm cannot run linux: guest code stops at int3, iretq" {
		t.Errorf("%v", err)
	}
	if (Report{}).OK() {
		t.Error("an empty report is OK")
	}
	if err := (Report{Results: []Result{{Instruction: "good"}}}).Err(); err != nil {
		t.Error(err)
	}
}
