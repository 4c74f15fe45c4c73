package bench

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/internal/node"
)

const (
	// transferMiB is how much a row about streams and files moves, and transferRounds
	// how often at most: that much work does not vary.
	transferMiB    = 64
	transferRounds = 2
	// warm is how many commands run before one counts.
	warm = 5
)

// used does something with a VM of the standard size that has run commands since it
// was restored, and removes it.
func (b *bench) used(ctx context.Context, do func(vm *node.VM) error) error {
	vm, err := b.scene.restore(ctx, standardMemory)
	if err != nil {
		return err
	}
	for range warm {
		err = errors.Join(err, run(ctx, vm, "true"))
	}
	if err == nil {
		err = do(vm)
	}
	return errors.Join(err, remove(ctx, vm))
}

// repeat returns how long each of n calls took. The first is not counted.
func repeat(n int, do func() error) (samples []float64, err error) {
	for i := range n + 1 {
		begin := time.Now()
		if err := do(); err != nil {
			return nil, err
		}
		if i > 0 {
			samples = append(samples, ms(time.Since(begin)))
		}
	}
	return samples, nil
}

// exec measures a round trip through the guest agent: of a command, and of nothing but
// a question, over a connection that is there and over a new one.
func (b *bench) exec(ctx context.Context) error {
	return b.used(ctx, func(vm *node.VM) error {
		if err := b.roundTrips("exec_true", func() error { return run(ctx, vm, "true") }); err != nil {
			return err
		}
		agent := vm.Agent()
		line := agent.Line()
		defer line.Close()
		err := b.roundTrips("ping", func() error {
			_, err := line.Ping(ctx)
			return err
		})
		if err != nil {
			return err
		}
		return b.roundTrips("ping_connect", func() error {
			_, err := agent.Ping(ctx)
			return err
		})
	})
}

// roundTrips adds a row, and says who executes its work.
func (b *bench) roundTrips(row string, do func() error) error {
	var samples []float64
	n := b.config.Creates
	_, by, err := watch(func() (err error) {
		samples, err = repeat(n, do)
		return err
	})
	if err != nil {
		return err
	}
	b.row(row, CMS, samples)
	b.phases = append(b.phases, by.breakdown(row+", by who executes", n+1))
	return nil
}

// transfer measures what a MiB costs on each way into a guest and out of it.
func (b *bench) transfer(ctx context.Context) error {
	return b.used(ctx, func(vm *node.VM) error {
		agent := vm.Agent()
		for _, way := range []struct {
			row string
			do  func() error
		}{
			{"exec_stdout_mib", func() error { return succeed(ctx, agent, client.Command{Args: producer, Stdout: io.Discard}) }},
			{"exec_stdin_mib", func() error { return succeed(ctx, agent, client.Command{Args: consumer, Stdin: zeros()}) }},
			{"put_mib", func() error {
				_, err := agent.Put(ctx, client.File{Path: transferFile}, zeros())
				return err
			}},
			{"get_mib", func() error {
				_, err := agent.Get(ctx, transferFile, io.Discard)
				return err
			}},
			// What the record of the VM takes of each but the last.
			{"hash_mib", func() error {
				_, err := io.Copy(sha256.New(), zeros())
				return err
			}},
		} {
			if err := b.perMiB(way.row, way.do); err != nil {
				return err
			}
		}
		return nil
	})
}

// perMiB adds a row about what moves transferMiB.
func (b *bench) perMiB(row string, do func() error) error {
	samples, err := repeat(min(b.config.Rounds, transferRounds), do)
	if err != nil {
		return fmt.Errorf("%s: %w", row, err)
	}
	for i := range samples {
		samples[i] /= transferMiB
	}
	b.row(row, CMS, samples)
	return nil
}

// What stands at the guest's end of a stream: programs that do as little as they can
// with it. transferFile is in the guest's memory.
var (
	producer = []string{"dd", "if=/dev/zero", "bs=65536", fmt.Sprint("count=", transferMiB<<20/65536)}
	consumer = []string{"dd", "of=/dev/null", "bs=65536"}
)

const transferFile = "/dev/shm/transfer"

func zeros() io.Reader { return io.LimitReader(endlessZeros{}, transferMiB<<20) }

type endlessZeros struct{}

func (endlessZeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// succeed runs a command, which has to succeed.
func succeed(ctx context.Context, agent *client.Client, cmd client.Command) error {
	var said bytes.Buffer
	cmd.Stderr = &said
	r, err := agent.Exec(ctx, cmd)
	if err == nil && r.ExitCode != 0 {
		err = fmt.Errorf("%s: exit code %d: %s", cmd.Args[0], r.ExitCode, &said)
	}
	return err
}
