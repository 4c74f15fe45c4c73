package vsock

import (
	"io"
	"testing"
)

// BenchmarkThroughput moves data between a host program and a mock guest, whose work is part of the figure.
func BenchmarkThroughput(b *testing.B) {
	chunk := make([]byte, 64<<10)
	b.Run("to guest", func(b *testing.B) {
		bench := newBench(b, nil)
		s, conn := bench.toGuest(1, bench.guest.listen(1))
		b.SetBytes(int64(len(chunk)))
		b.ResetTimer()
		go func() {
			for range b.N {
				conn.Write(chunk)
			}
			conn.Close()
		}()
		io.Copy(io.Discard, s)
		s.Close()
	})
	b.Run("to host", func(b *testing.B) {
		bench := newBench(b, nil)
		s, conn := bench.toHost()
		b.SetBytes(int64(len(chunk)))
		b.ResetTimer()
		go func() {
			for range b.N {
				s.Write(chunk)
			}
			s.Close()
		}()
		io.Copy(io.Discard, conn)
		conn.Close()
	})
}

// BenchmarkRoundTrip sends one byte there and back.
func BenchmarkRoundTrip(b *testing.B) {
	bench := newBench(b, nil)
	s, conn := bench.toGuest(1, bench.guest.listen(1))
	go func() {
		io.Copy(s, s)
		s.Close()
	}()
	p := make([]byte, 1)
	for b.Loop() {
		conn.Write(p)
		io.ReadFull(conn, p)
	}
	conn.Close()
}

// BenchmarkConnect opens and closes a connection from the host.
func BenchmarkConnect(b *testing.B) {
	bench := newBench(b, nil)
	accept := bench.guest.listen(1)
	for b.Loop() {
		s, conn := bench.toGuest(1, accept)
		conn.Close()
		s.Close()
	}
}
