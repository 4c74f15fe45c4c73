package vmm

import (
	"fmt"
	"strings"
	"testing"
)

func TestExitRefine(t *testing.T) {
	panicked := []string{"[ 1.0] something", "[ 1.1] Kernel panic - not syncing: no init found", "[ 1.2] ---[ end"}
	cases := []struct {
		name    string
		exit    Exit
		want    Reason
		mention string
	}{
		{"reset after a panic", Exit{Reason: ReasonReset, Console: panicked}, ReasonGuestPanic, "no init found"},
		{"triple fault after a panic", Exit{Reason: ReasonTripleFault, Console: panicked}, ReasonGuestPanic, "no init found"},
		{"reset", Exit{Reason: ReasonReset, Console: panicked[:1]}, ReasonReset, ""},
		{"triple fault", Exit{Reason: ReasonTripleFault}, ReasonTripleFault, ""},
		{"power-off of a guest that prints such a line", Exit{Reason: ReasonShutdown, Console: panicked}, ReasonShutdown, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e := c.exit
			e.refine()
			if e.Reason != c.want {
				t.Errorf("reason %s, want %s", e.Reason, c.want)
			}
			if !strings.Contains(e.Error(), c.mention) {
				t.Errorf("%q does not mention %q", e.Error(), c.mention)
			}
		})
	}
}

// The lines that say why a kernel panicked come before a stack that is longer
// than a report.
func TestExitShowsThePanic(t *testing.T) {
	var lines []string
	for i := range 100 {
		lines = append(lines, fmt.Sprintf("line %d", i))
	}
	e := Exit{Reason: ReasonReset, Console: lines}
	e.refine()
	if len(e.Console) != reportLines || e.Console[0] != "line 80" || e.Console[reportLines-1] != "line 99" {
		t.Errorf("report without a panic has %d lines, %q to %q", len(e.Console), e.Console[0], e.Console[len(e.Console)-1])
	}
	lines[30] = "[ 1.1] Kernel panic - not syncing: sysrq"
	e = Exit{Reason: ReasonGuestPanic, Console: lines}
	e.refine()
	if len(e.Console) != reportLines || e.Console[0] != lines[30] || e.Detail != "Kernel panic - not syncing: sysrq" {
		t.Errorf("report of a panic (%s) begins with %q", e.Detail, e.Console[0])
	}
}
