// Command embed shows forkvm as a library: it boots an image, runs a command,
// takes a snapshot, restores it and forks the restored machine.
//
//	embed IMAGE-DIRECTORY STORE-DIRECTORY
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/snapshot/store"
)

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: embed IMAGE-DIRECTORY STORE-DIRECTORY")
	}
	if err := run(context.Background(), os.Args[1], os.Args[2], os.Stdout); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, imageDir, storeDir string, out io.Writer) error {
	img, err := image.Open(imageDir)
	if err != nil {
		return err
	}
	snapshots, err := store.Open(storeDir)
	if err != nil {
		return err
	}
	defer snapshots.Close()
	vm, err := forkvm.Boot(ctx, img, forkvm.Config{Name: "first", MemoryBytes: 256 << 20})
	if err != nil {
		return err
	}
	defer vm.Close()
	if err := say(ctx, out, vm, "echo booted > /root/state; uname -sr"); err != nil {
		return err
	}
	if _, err := vm.Snapshot(ctx, snapshots, "booted"); err != nil {
		return err
	}

	clone, err := forkvm.Restore(ctx, snapshots, "booted", forkvm.Config{Name: "clone"})
	if err != nil {
		return err
	}
	defer clone.Close()
	if err := say(ctx, out, clone, "hostname; cat /root/state; echo cloned > /root/state"); err != nil {
		return err
	}

	children, err := clone.Fork(ctx, forkvm.Config{Name: "left"}, forkvm.Config{Name: "right"})
	if err != nil {
		return err
	}
	for _, child := range children {
		defer child.Close()
	}
	for _, child := range children {
		if err := say(ctx, out, child, "hostname; cat /root/state"); err != nil {
			return err
		}
	}
	return say(ctx, out, vm, "cat /root/state") // still "booted": clones share nothing that is written
}

// say runs a shell command in a VM and shows what it prints.
func say(ctx context.Context, out io.Writer, vm *forkvm.VM, command string) error {
	result, err := vm.Agent().Exec(ctx, client.Command{Args: []string{"sh", "-c", command}, Stdout: out, Stderr: out})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("%s: exit code %d", command, result.ExitCode)
	}
	return err
}
