package failure

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCodeOfErrors(t *testing.T) {
	cases := []struct {
		name      string
		err       error
		code      Code
		retryable bool
	}{
		{"own", New(VMNotFound, "no vm named %q", "a"), VMNotFound, false},
		{"wrapped own", fmt.Errorf("fork: %w", New(VMProcessGone, "gone")), VMProcessGone, true},
		{"disk full", fmt.Errorf("write layer: %w", unix.ENOSPC), NoSpace, true},
		{"quota", &os.PathError{Op: "write", Path: "x", Err: unix.EDQUOT}, NoSpace, true},
		{"permission", &os.PathError{Op: "open", Path: "/dev/kvm", Err: unix.EACCES}, NoPermission, false},
		{"anything else", errors.New("odd"), Internal, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := As(Internal, c.err)
			if got.Code != c.code || got.Retryable != c.retryable {
				t.Errorf("got %s retryable=%v, want %s retryable=%v", got.Code, got.Retryable, c.code, c.retryable)
			}
			if got.Error() != c.err.Error() {
				t.Errorf("message %q, want %q", got.Error(), c.err.Error())
			}
			if !Is(got, c.code) {
				t.Error("Is does not find the code")
			}
		})
	}
}

func TestErrorCrossesJSON(t *testing.T) {
	sent := New(NoSpace, "write layer: %w", unix.ENOSPC)
	if !errors.Is(sent, unix.ENOSPC) {
		t.Error("cause is lost on this side")
	}
	data, err := json.Marshal(sent)
	if err != nil {
		t.Fatal(err)
	}
	var got Error
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if got.Code != NoSpace || !got.Retryable || got.Message != sent.Message {
		t.Errorf("got %+v", got)
	}
}
