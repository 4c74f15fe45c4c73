package vmm

import (
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
