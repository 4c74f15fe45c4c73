package store

import (
	"fmt"
	"testing"

	"github.com/forkvm/forkvm/snapshot"
)

// BenchmarkStep stores a step of so many new pages, and as many blocks, on top of
// a stack of so many layers that the store has: what comes after the pause.
func BenchmarkStep(b *testing.B) {
	for _, c := range []struct{ depth, pages int }{{1, 10}, {15, 10}, {1, 250}} {
		b.Run(fmt.Sprintf("depth=%d/pages=%d", c.depth, c.pages), func(b *testing.B) {
			s := openStore(b, b.TempDir())
			m := &machine{}
			defer m.close()
			for range c.depth {
				if err := m.grow(1); err != nil {
					b.Fatal(err)
				}
			}
			publishStep(b, s, m, "base", nil)
			below := len(m.memory)
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				closeAll(m.memory[below:])
				closeAll(m.disk[below:])
				m.memory, m.disk = m.memory[:below], m.disk[:below]
				if err := m.grow(uint64(c.pages)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				publishStep(b, s, m, fmt.Sprint("step-", i), []string{snapshot.NewID()})
			}
		})
	}
}
