package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/snapshot/store"
)

// imageName is what the image is called in the scene's store.
const imageName = "guest"

// settle is how long machines are left alone before something is measured, so
// that work which they put off is done. Where the clock counts it costs nothing.
const settle = 200 * time.Millisecond

// age is how old a guest is when its snapshot is taken. Its kernel reports free memory
// to the host in rounds of two seconds, a sixteenth of it in each. What of that is left
// to do in a snapshot, each clone does again.
const age = time.Minute

// SceneConfig says where and with what to measure.
type SceneConfig struct {
	// Image is the directory of the image that guests boot from.
	Image string
	// Dir is an empty directory with a short path for a store and running VMs.
	Dir string
	// RunDir is an empty directory with a short path, in memory as /run is.
	RunDir string
	// Command is the program forkvm with the verb of a VM process.
	Command []string
	// NetworkCommand is the program of a VM with a network card.
	NetworkCommand []string
	// Guestload is the program of that name for guests.
	Guestload string
	// Firmware is QEMU's directory of firmware; empty: the one it was built with.
	Firmware string
	// Firecracker is the program; empty: there is none.
	Firecracker string
	// SSHD is a directory with what a guest needs for sshd at the place where it
	// belongs, guestload beside it; empty: there is none.
	SSHD string
}

// scene is a host with an image, a snapshot for each size of RAM that has been
// asked for, and the VMs of a measurement.
type scene struct {
	node      *node.Node
	dir       string
	snapshots map[uint64]string
	// first are the milliseconds of a snapshot's first creates.
	first map[uint64][]float64
	card  bool // there is cardSnapshot
}

func newScene(c SceneConfig) (*scene, error) {
	n, err := node.Open(node.Config{
		DataDir: filepath.Join(c.Dir, "data"),
		RunDir:  c.RunDir,
		Command: c.Command, NetworkCommand: c.NetworkCommand,
		Version: "bench",
	})
	if err != nil {
		return nil, err
	}
	s := &scene{node: n, dir: c.Dir, snapshots: map[uint64]string{}, first: map[uint64][]float64{}}
	if err := s.addImage(c.Image); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return s, nil
}

func (s *scene) addImage(source string) error {
	st, err := store.Open(filepath.Join(s.dir, "data"))
	if err != nil {
		return err
	}
	err = st.PublishImage(imageName, func(dir string) error { return os.CopyFS(dir, os.DirFS(source)) })
	return errors.Join(err, st.Close())
}

// close ends what still runs or waits.
func (s *scene) close(ctx context.Context) error {
	_, failed := s.node.Prepare(ctx, node.Waiting{})
	vms, err := s.node.List()
	errs := []error{failed, err}
	for _, vm := range vms {
		errs = append(errs, vm.Remove(ctx, true))
	}
	return errors.Join(append(errs, s.node.Close())...)
}

// snapshot returns the name of a snapshot of a guest with this much RAM that has
// booted and run its first commands: the environment that rollouts start from.
func (s *scene) snapshot(ctx context.Context, memory uint64) (string, error) {
	if name, ok := s.snapshots[memory]; ok {
		return name, nil
	}
	vm, err := s.node.Boot(ctx, imageName, node.Options{CPUs: 1, MemoryBytes: memory})
	if err != nil {
		return "", err
	}
	defer vm.Remove(ctx, true)
	for range 3 {
		if err := run(ctx, vm, "true"); err != nil {
			return "", err
		}
	}
	time.Sleep(age)
	name := fmt.Sprintf("%dm", memory>>20)
	if _, err := vm.Snapshot(ctx, name, ""); err != nil {
		return "", err
	}
	if s.first[memory], err = s.firstCreates(ctx, name); err != nil {
		return "", err
	}
	s.snapshots[memory] = name
	return name, nil
}

// firstCreates makes the creates that are different, and returns how many milliseconds
// they took: the first brings the snapshot into the host's page cache and notes what
// the clone uses of its RAM, the second makes huge pages of that.
func (s *scene) firstCreates(ctx context.Context, snapshot string) (took []float64, err error) {
	for range 2 {
		begin := time.Now()
		vm, err := s.node.Restore(ctx, snapshot, node.Options{})
		if err != nil {
			return nil, err
		}
		took = append(took, ms(time.Since(begin)))
		if err := remove(ctx, vm); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// restore starts a VM from the snapshot of this size and lets it settle.
func (s *scene) restore(ctx context.Context, memory uint64) (*node.VM, error) {
	name, err := s.snapshot(ctx, memory)
	if err != nil {
		return nil, err
	}
	vm, err := s.node.Restore(ctx, name, node.Options{})
	time.Sleep(settle)
	return vm, err
}

// remove ends VMs and waits until the host has forgotten them.
func remove(ctx context.Context, vms ...*node.VM) error {
	var errs []error
	for _, vm := range vms {
		if vm != nil {
			errs = append(errs, vm.Remove(ctx, true))
		}
	}
	time.Sleep(settle)
	return errors.Join(errs...)
}

// run runs a command in a guest, which has to succeed.
func run(ctx context.Context, vm *node.VM, command ...string) error {
	return succeed(ctx, vm.Agent(), client.Command{Args: command, Stdout: io.Discard})
}

// overhead is about how many pages a command dirties that does nothing.
const overhead = 450

// dirty lets the guest write about so many pages of its memory. Where they are
// fewer than any command dirties it does nothing: a guest that is left alone
// writes a few.
func dirty(ctx context.Context, vm *node.VM, pages int) error {
	if pages <= overhead {
		return nil
	}
	return run(ctx, vm, "dd", "if=/dev/urandom", "of=/dev/shm/dirty", "bs=4096", "conv=notrunc", fmt.Sprint("count=", pages-overhead))
}
