package process

import (
	"runtime/debug"
	"testing"
)

func TestQuiet(t *testing.T) {
	percent := debug.SetGCPercent(80)
	defer debug.SetGCPercent(percent)
	over := quiet()
	if was := debug.SetGCPercent(-1); was != -1 {
		t.Errorf("garbage is collected at %d percent", was)
	}
	over()
	if now := debug.SetGCPercent(80); now != 80 {
		t.Errorf("garbage is collected at %d percent afterwards, was at 80", now)
	}
}
