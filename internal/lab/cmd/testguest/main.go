// Command testguest builds what tests boot in the lab into a directory: images
// with the guest agent and busybox, and the program that keeps a guest busy.
//
//	testguest DIRECTORY
//
// It does nothing when the directory already holds what it would build, so that
// the lab can keep its copy.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/guest/testimage"
	"github.com/forkvm/forkvm/internal/lab"
)

// module is where the programs for the guest are.
const module = "github.com/forkvm/forkvm"

const busybox = "/bin/busybox"

// revision goes up when images of the same parts come to be others.
const revision = 2

// images are made from one kernel and one guest agent.
var images = map[string]testimage.Config{
	"memory": {},
	"disk":   {Disk: true},
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: testguest DIRECTORY")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "testguest:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, output string) error {
	kernel := os.Getenv(lab.EnvKernel)
	if kernel == "" {
		var err error
		if kernel, err = lab.FetchKernel(ctx, ""); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(filepath.Clean(output)), 0o755); err != nil {
		return err
	}
	fresh, err := os.MkdirTemp(filepath.Dir(filepath.Clean(output)), ".testguest-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(fresh)
	if err := build(ctx, fresh, kernel); err != nil {
		return err
	}
	return publish(ctx, fresh, output, kernel)
}

// build compiles the programs. They are the same bytes each time that their
// sources are.
func build(ctx context.Context, dir, kernel string) error {
	for _, name := range []string{"cmd/forkvm-agent", "internal/testkit/guestload"} {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w",
			"-o", filepath.Join(dir, filepath.Base(name)), module+"/"+name)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build %s: %w", name, err)
		}
	}
	key, err := keyOf(dir, kernel)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "key"), []byte(key+"\n"), 0o644)
}

// keyOf is a hash of everything that the images are made from.
func keyOf(dir, kernel string) (string, error) {
	sum := sha256.New()
	fmt.Fprintln(sum, revision, image.CommandLine, testimage.DiskSize)
	for _, path := range []string{filepath.Join(dir, "forkvm-agent"), filepath.Join(dir, "guestload"), busybox, kernel} {
		fmt.Fprintln(sum, path == kernel)
		if err := addFile(sum, path); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// addFile adds a file's content, or a directory's name.
func addFile(w io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.IsDir() {
		fmt.Fprintln(w, path)
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

// publish makes the images unless output has them, and puts all into place.
func publish(ctx context.Context, fresh, output, kernel string) error {
	want, err := os.ReadFile(filepath.Join(fresh, "key"))
	if err != nil {
		return err
	}
	if have, err := os.ReadFile(filepath.Join(output, "key")); err == nil && string(have) == string(want) {
		return nil
	}
	for name, c := range images {
		c.Output, c.Kernel, c.Busybox = filepath.Join(fresh, name), kernel, busybox
		c.Agent = filepath.Join(fresh, "forkvm-agent")
		c.Cache = filepath.Join(filepath.Dir(filepath.Clean(output)), "kernels")
		if _, err := testimage.Build(ctx, c); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(output); err != nil {
		return err
	}
	return os.Rename(fresh, output)
}
