package main

import (
	"context"
	"reflect"
	"testing"
	"time"
)

func TestPassedEnv(t *testing.T) {
	environ := []string{"HOME=/root", "PATH=/bin", "REQUIRE=kvm", "FORKVM_X=1", "MINE=2", "SOAK_TIME=3", "LAB_ICOUNT=1", "OTHER=4"}
	want := []string{"REQUIRE=kvm", "FORKVM_X=1", "MINE=2", "SOAK_TIME=3", "LAB_ICOUNT=1"}
	if got := passedEnv(environ, "MINE, THEIRS"); !reflect.DeepEqual(got, want) {
		t.Errorf("passed %q, want %q", got, want)
	}
}

func TestTimeoutFrom(t *testing.T) {
	for _, test := range []struct {
		text string
		want time.Duration
		ok   bool
	}{{"", time.Hour, true}, {"90s", 90 * time.Second, true}, {"90", 0, false}, {"-1s", 0, false}} {
		if got, err := timeoutFrom(test.text, time.Hour); got != test.want || (err == nil) != test.ok {
			t.Errorf("timeout of %q: %v, %v", test.text, got, err)
		}
	}
}

func TestRequirements(t *testing.T) {
	for list, want := range map[string]string{"": "kvm,root", "tap": "tap,kvm,root"} {
		if got := requirements(list); got != want {
			t.Errorf("requirements(%q) = %q, want %q", list, got, want)
		}
	}
}

func TestUsageErrors(t *testing.T) {
	for _, args := range [][]string{nil, {"dance"}, {"run"}, {"run", " "}, {"test", "-nosuchflag"}} {
		if code, err := dispatch(context.Background(), args); code != exitUsage || err != nil {
			t.Errorf("%q: exit status %d, %v; want %d", args, code, err, exitUsage)
		}
	}
}
