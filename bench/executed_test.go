package bench

import "testing"

func TestExecuted(t *testing.T) {
	got, err := parseExecuted("cpu  30 1 10 999 5 2 3 0 20 1\ncpu0 0 0 0 0 0 0 0 0 0 0\n")
	if err != nil || got != (executed{guest: 210, kernel: 150, ours: 100, idle: 10040}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, broken := range []string{"", "cpu 1 2\n", "intr 5\n"} {
		if _, err := parseExecuted(broken); err == nil {
			t.Errorf("%q was read", broken)
		}
	}
	if _, err := readExecuted(); err != nil {
		t.Error(err)
	}
}
