package testkit

import (
	"os"
	"path/filepath"
	"testing"
)

// EnvEnvironment names a directory with what RequireEnvironment finds, where it is not the lab's.
const EnvEnvironment = "FORKVM_TEST_ENVIRONMENT"

// RequireEnvironment returns a data directory of forkvm with the quickstart's image "ledger", a Debian with PostgreSQL, git and
// pytest, and the directory of the task that is set in it. Tests may change the former.
func RequireEnvironment(t testing.TB) (data, task string) {
	t.Helper()
	return environment(t, "data", "key"), environment(t, "task", "task.toml")
}

// RequireMirror returns a directory with a Debian repository for guests of that image.
func RequireMirror(t testing.TB) string {
	t.Helper()
	return environment(t, "mirror", "key")
}

// environment returns one of the directories of the environment, which has this file.
func environment(t testing.TB, name, file string) string {
	t.Helper()
	dir := os.Getenv(EnvEnvironment)
	if dir == "" {
		dir = "/in"
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(filepath.Join(path, file)); err != nil {
		Require(t, "environment", "needs "+path+": 'make test-task' builds it and runs the tests that need it")
	}
	return path
}

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
