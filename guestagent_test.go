package forkvm_test

import (
	"context"
	"testing"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/agenttest"
	"github.com/forkvm/forkvm/internal/testkit"
)

// The cases of package agenttest with a real guest, whose guest agent is PID 1.
func TestCaseB6(t *testing.T)  { agentCase(t, agenttest.B6) }
func TestCaseB7(t *testing.T)  { agentCase(t, agenttest.B7) }
func TestCaseB8(t *testing.T)  { agentCase(t, agenttest.B8) }
func TestCaseB9(t *testing.T)  { agentCase(t, agenttest.B9) }
func TestCaseB10(t *testing.T) { agentCase(t, agenttest.B10) }

// TestCaseB11 has, at its full size, a guest with room for a file of more than 2 GiB in its memory.
func TestCaseB11(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	g := agentOf(t, ctx, restore(t, ctx, st, name, forkvm.Config{Name: "case"}))
	agenttest.B11(t, g)
	t.Run("long file", func(t *testing.T) {
		if !g.Full {
			agenttest.LongFile(t, g, g.Dir, 8<<20)
			return
		}
		large, err := forkvm.Boot(ctx, openImage(t, "memory"), config(t, forkvm.Config{Name: "large", MemoryBytes: 3 << 30}))
		if err != nil {
			t.Fatal(err)
		}
		closeAtEnd(t, large)
		g := agentOf(t, ctx, large)
		sh(t, ctx, large, "mount -o remount,size=2500m /dev/shm")
		agenttest.LongFile(t, g, "/dev/shm", 2<<30+1)
	})
}

func agentCase(t *testing.T, run func(*testing.T, *agenttest.Guest)) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	run(t, agentOf(t, ctx, restore(t, ctx, st, name, forkvm.Config{Name: "case"})))
}

// agentOf makes a machine's guest agent one for cases.
func agentOf(t *testing.T, ctx context.Context, vm *forkvm.VM) *agenttest.Guest {
	t.Helper()
	return &agenttest.Guest{
		Client: vm.Agent(), Dir: sh(t, ctx, vm, "mktemp -d /root/caseXXXXXX"),
		Full: !testing.Short(), Emulated: testkit.InLab(), Counted: testkit.Counted(), Alone: true,
	}
}
