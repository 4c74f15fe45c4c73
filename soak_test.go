package forkvm_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot/store"
)

const (
	// depth is how many generations a chain has: a machine, a clone of it, a
	// clone of that.
	depth = 5
	// shortRounds is what the ordinary test run has time for: a chain with one
	// vCPU and one with four.
	shortRounds = 2 * depth
)

// soakNumber reads a number from the environment.
func soakNumber(t *testing.T, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// TestSoak clones machines at random moments under CPU, memory, disk and vsock
// load, each clone from the one before, five generations deep, with one vCPU
// and with four. In each clone the guest agent answers and everything goes on:
// patterns in memory and on disk are right, every vCPU's timer ticks,
// connections carry what was sent. At the end of a chain the disk has a file
// system without errors.
//
// SOAK_ROUNDS says how many clones to make, SOAK_SEED repeats a run as far as
// time lets it.
func TestSoak(t *testing.T) {
	testkit.Long(t)
	rounds := int(soakNumber(t, "SOAK_ROUNDS", shortRounds))
	seed := soakNumber(t, "SOAK_SEED", uint64(time.Now().UnixNano()))
	begin(t)
	begun := time.Now()
	s := &soak{random: rand.New(rand.NewPCG(seed, 0))}
	t.Logf("SOAK_SEED=%d", seed)
	for chain := 0; s.rounds < rounds && !t.Failed(); chain++ {
		cpus := 1
		if chain%2 == 1 {
			cpus = 4
		}
		n := min(depth, rounds-s.rounds)
		t.Run(fmt.Sprintf("chain %d with %d vCPUs", chain, cpus), func(t *testing.T) { s.chain(t, cpus, n) })
		s.chains++
	}
	t.Logf("soak: %d of %d rounds in %d chains, up to %d generations deep, with 1 and 4 vCPUs: %d snapshots restored, %d forks, %d vsock connections checked, longest clone %v, in %v",
		s.rounds, rounds, s.chains, depth, s.restores, s.forks, s.connections, s.longest.Round(time.Millisecond), time.Since(begun).Round(time.Second))
}

// soak counts.
type soak struct {
	random          *rand.Rand
	rounds, chains  int
	restores, forks int
	connections     int64
	longest         time.Duration
}

// chain makes one clone after the other.
func (s *soak) chain(t *testing.T, cpus, generations int) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	st, name := parent(t, ctx, cpus)
	own := openStore(t)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "generation-0"})
	startLoad(t, ctx, vm)
	for generation := 1; generation <= generations; generation++ {
		vm = s.next(t, ctx, own, vm, generation)
		if err := loadGoesOn(ctx, vm); err != nil {
			t.Fatalf("generation %d: %v", generation, err)
		}
		s.rounds++
	}
	sh(t, ctx, vm, "sync")
	takeSnapshot(t, ctx, vm, own, "last")
	checkFilesystem(t, exportDisk(t, own, "last"))
}

// next clones a machine at a random moment of its life and returns the clone.
func (s *soak) next(t *testing.T, ctx context.Context, own *store.Store, vm *forkvm.VM, generation int) *forkvm.VM {
	load := startStorm(ctx, vm, 2)
	time.Sleep(time.Duration(s.random.Int64N(int64(300 * time.Millisecond))))
	name := fmt.Sprintf("generation-%d", generation)
	var clone *forkvm.VM
	begun := time.Now()
	if s.random.IntN(2) == 0 {
		clone = fork(t, ctx, vm, forkvm.Config{Name: name})[0]
		s.forks++
	} else {
		takeSnapshot(t, ctx, vm, own, name)
		clone = restore(t, ctx, own, name, forkvm.Config{Name: name})
		s.restores++
	}
	s.longest = max(s.longest, time.Since(begun))
	// The source has gone on all the time.
	if err := loadGoesOn(ctx, vm); err != nil {
		t.Fatalf("source of generation %d: %v", generation, err)
	}
	if err := load.end(); err != nil {
		t.Fatalf("source of generation %d: %v", generation, err)
	}
	s.connections += load.through.Load()
	if err := vm.Close(); err != nil {
		t.Errorf("close generation %d: %v", generation-1, err)
	}
	if err := echo(ctx, clone, byte(generation), 50000); err != nil {
		t.Fatalf("generation %d: %v", generation, err)
	}
	return clone
}
