package testkit

import (
	"os"
	"path/filepath"
	"testing"
)

// EnvGuest names the directory with what tests boot, where it is not the lab's.
const EnvGuest = "FORKVM_TEST_GUEST"

// RequireGuest returns a directory that command internal/lab/cmd/testguest has made: the images "memory" and "disk" of
// package guest/testimage, and the program "guestload". Tests that boot guests call RequireKVM beside it.
func RequireGuest(t testing.TB) string {
	t.Helper()
	dir := os.Getenv(EnvGuest)
	if dir == "" {
		dir = "/in/guest"
	}
	RequireFile(t, filepath.Join(dir, "key"), "'make test-lab' builds it; elsewhere run internal/lab/cmd/testguest and set "+EnvGuest)
	return dir
}
