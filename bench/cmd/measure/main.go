// Command measure runs the benchmark on this machine and prints its table. make
// bench runs it in the lab.
//
//	measure -image /in/guest/disk -forkvm /usr/local/bin/forkvm -out /out
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"

	"github.com/forkvm/forkvm/bench"
)

type options struct {
	image, guestload, vm, net, work, run, out, only, firmware, firecracker, sshd string
	creates, rounds, clones                                                      int
}

func main() {
	var o options
	flag.StringVar(&o.image, "image", "/in/guest/disk", "`directory` of the image that guests boot from")
	flag.StringVar(&o.guestload, "guestload", "/in/guest/guestload", "the `program` of that name for guests")
	flag.StringVar(&o.vm, "vm", "/usr/local/bin/forkvm-vm", "the `program` of a VM's process")
	flag.StringVar(&o.net, "net", "/usr/local/bin/forkvm-net", "the `program` of one of a VM with a network card")
	flag.StringVar(&o.work, "work", "/var/lib/forkvm", "`directory` to work in, with a short path")
	flag.StringVar(&o.run, "run", "/run", "`directory` for running VMs, in memory if clones are to have huge pages")
	flag.StringVar(&o.out, "out", "", "`directory` for results.json and details.json")
	flag.StringVar(&o.only, "only", "", "measure only what matches `regexp`, such as ^create")
	flag.StringVar(&o.firmware, "firmware", "", "`directory` of QEMU's firmware, if it is not where QEMU was built for")
	flag.StringVar(&o.firecracker, "firecracker", "", "Firecracker's `program`, if there is one")
	flag.StringVar(&o.sshd, "sshd", "", "`directory` with sshd and what it needs in a guest, if there is one")
	flag.IntVar(&o.creates, "creates", 100, "`number` of creates")
	flag.IntVar(&o.rounds, "rounds", 10, "`number` of repetitions of anything else")
	flag.IntVar(&o.clones, "clones", 0, "start this `number` of clones of a small guest instead, and keep them all")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "measure:", err)
		os.Exit(1)
	}
}

func measure(ctx context.Context, o options) error {
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("-only: %w", err)
	}
	dir, err := os.MkdirTemp(o.work, "b")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	run, err := os.MkdirTemp(o.run, "b")
	if err != nil {
		return err
	}
	defer os.RemoveAll(run)
	scene := bench.SceneConfig{
		Image: o.image, Dir: dir, RunDir: run, Command: []string{o.vm}, NetworkCommand: []string{o.net},
		Guestload: o.guestload, Firmware: o.firmware, Firecracker: o.firecracker, SSHD: o.sshd,
	}
	if o.clones > 0 {
		return bench.Clones(ctx, scene, o.clones, os.Stdout)
	}
	report, err := bench.Run(ctx, bench.Config{
		Scene:   scene,
		Only:    only,
		Creates: o.creates,
		Rounds:  o.rounds,
		Log:     os.Stderr,
	})
	err = errors.Join(err, report.Print(os.Stdout))
	if o.out == "" {
		return err
	}
	return errors.Join(err, report.Write(o.out))
}
