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
	"path/filepath"
	"regexp"
	"syscall"

	"github.com/forkvm/forkvm/bench"
)

type options struct {
	image, forkvm, work, out, only string
	creates, rounds                int
}

func main() {
	var o options
	flag.StringVar(&o.image, "image", "/in/guest/disk", "`directory` of the image that guests boot from")
	flag.StringVar(&o.forkvm, "forkvm", "/usr/local/bin/forkvm", "the `program` to measure")
	flag.StringVar(&o.work, "work", "/var/lib/forkvm", "`directory` to work in, with a short path")
	flag.StringVar(&o.out, "out", "", "`directory` for results.json")
	flag.StringVar(&o.only, "only", "", "measure only what matches `regexp`: create, fork, clone")
	flag.IntVar(&o.creates, "creates", 100, "`number` of creates")
	flag.IntVar(&o.rounds, "rounds", 10, "`number` of repetitions of anything else")
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
	report, err := bench.Run(ctx, bench.Config{
		Scene:   bench.SceneConfig{Image: o.image, Dir: dir, Command: []string{o.forkvm, "vm"}},
		Only:    only,
		Creates: o.creates,
		Rounds:  o.rounds,
		Log:     os.Stderr,
	})
	err = errors.Join(err, report.Print(os.Stdout))
	if o.out == "" {
		return err
	}
	f, ferr := os.Create(filepath.Join(o.out, "results.json"))
	if ferr != nil {
		return errors.Join(err, ferr)
	}
	return errors.Join(err, report.WriteJSON(f), f.Close())
}
