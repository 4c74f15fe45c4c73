// Command forkvm starts, freezes and forks virtual machines.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/cli"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/doctor"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/settings"
	"github.com/forkvm/forkvm/internal/node"
)

func main() {
	ctx, stop := notify()
	code := cli.Main(ctx, environment(), os.Args[1:])
	stop()
	os.Exit(code)
}

// notify returns a context that the first interrupt or request to end cancels.
// The second one ends the program at once.
func notify() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// Somebody who stops reading must not keep us from ending a foreground VM:
	// with a handler, writing fails instead of killing us.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		s, ok := (<-signals).(syscall.Signal)
		if ok {
			signal.Stop(signals)
			cancel(&cli.Interrupted{Signal: s})
		}
	}()
	return ctx, func() { signal.Stop(signals) }
}

func environment() cli.Environment {
	return cli.Environment{
		Stdin:          os.Stdin,
		Stdout:         os.Stdout,
		Stderr:         os.Stderr,
		StdoutTerminal: output.IsTerminal(os.Stdout),
		StderrTerminal: output.IsTerminal(os.Stderr),
		User:           settings.User{UID: os.Geteuid(), Getenv: os.Getenv},
		Now:            time.Now,
		Version:        version(),
		GuestAgent:     guestAgent(),
		OpenNode:       openNode,
		Examine:        doctor.Run,
	}
}

func openNode(s settings.Settings) (cli.Node, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	n, err := node.Open(node.Config{
		DataDir: s.DataDir,
		RunDir:  s.RunDir,
		Command: []string{processProgram(self, "forkvm-vm")},
		// A VM with a network card gets a process that has a network stack, which the others need not pay for.
		NetworkCommand: []string{processProgram(self, "forkvm-net")},
		Version:        version(),
	})
	if err != nil {
		return nil, err
	}
	return cli.Local(n), nil
}

// processProgram is a program of VMs' processes, beside this one or where programs are looked for.
func processProgram(self, name string) string {
	beside := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(beside); err != nil {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return beside
}

// guestAgent is the guest agent's program that was installed beside this one.
func guestAgent() string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Join(filepath.Dir(self), "forkvm-agent")
}

// release is the version that this source tree leads to. A build of a tagged
// module says its own.
const release = "0.1.0-dev"

func version() string {
	info, ok := debug.ReadBuildInfo()
	if ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return release
}
