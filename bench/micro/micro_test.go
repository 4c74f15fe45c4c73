package micro

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
)

// BenchmarkCreate makes machines from a frozen one, each until it has answered.
func BenchmarkCreate(b *testing.B) {
	system := openKVM(b)
	f := parent(b, boot(b, system))
	for b.Loop() {
		g := clone(b, system, f)
		b.StopTimer()
		g.close()
		b.StartTimer()
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
}

// parent freezes a guest for clones.
func parent(b *testing.B, g *guest) frozen {
	state, cut, _ := g.freeze(b)
	b.Cleanup(func() { cut.Close() })
	f := frozen{state: state}
	f.layers = append(f.layers, cut)
	return f
}

// BenchmarkFork makes children of a running guest, all of which have answered at
// the end, and reports what one costs.
func BenchmarkFork(b *testing.B) {
	for _, children := range []int{1, 16, 64} {
		b.Run(fmt.Sprint("children=", children), func(b *testing.B) {
			system := openKVM(b)
			g := boot(b, system)
			below := parent(b, g)
			guests := make([]*guest, children)
			for b.Loop() {
				state, cut, _ := g.freeze(b)
				if err := g.Pause(); err != nil { // it would take a processor from the children
					b.Fatal(err)
				}
				f := frozen{state: state, layers: append(below.layers[:1:1], cut)}
				for i := range guests {
					guests[i] = clone(b, system, f)
				}
				b.StopTimer()
				for _, child := range guests {
					child.close()
				}
				cut.Close()
				if err := g.Resume(); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*children), "µs/child")
		})
	}
}

// BenchmarkPause is how long a guest stands still that has written so many pages
// since it was frozen last.
func BenchmarkPause(b *testing.B) {
	for _, pages := range []uint32{10, 1000, 20000} {
		b.Run(fmt.Sprint("pages=", pages), func(b *testing.B) {
			g := boot(b, openKVM(b))
			parent(b, g)
			var paused time.Duration
			for b.Loop() {
				g.write(b, pages)
				_, cut, pause := g.freeze(b)
				paused += pause
				cut.Close()
			}
			b.ReportMetric(float64(paused.Microseconds())/float64(b.N), "µs-pause")
			b.ReportMetric(float64(paused.Nanoseconds())/float64(b.N)/float64(pages), "ns/page")
		})
	}
}

// BenchmarkMemory is what an idle clone adds to the memory that its process
// shares with nobody.
func BenchmarkMemory(b *testing.B) {
	const clones = 32
	system := openKVM(b)
	f := parent(b, boot(b, system))
	var each float64
	for b.Loop() {
		before := linux.PrivateBytes(os.Getpid())
		var guests []*guest
		for range clones {
			guests = append(guests, clone(b, system, f))
		}
		each = float64(linux.PrivateBytes(os.Getpid())-before) / clones
		for _, g := range guests {
			g.close()
		}
	}
	b.ReportMetric(each/(1<<10), "KiB/clone")
}
