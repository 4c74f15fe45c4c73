package vsock

import (
	"errors"
	"testing"
)

// fakeStream is a socket whose every answer is laid down.
type fakeStream struct {
	writes []fakeWrite
	got    []byte
	shut   []string
	closed bool
}

type fakeWrite struct {
	n   int
	err error
}

func (s *fakeStream) write(p []byte) (int, error) {
	w := fakeWrite{len(p), nil}
	if len(s.writes) > 0 {
		w, s.writes = s.writes[0], s.writes[1:]
	}
	s.got = append(s.got, p[:w.n]...)
	return w.n, w.err
}

func (s *fakeStream) read([]byte) (int, error) { return 0, errWouldBlock }
func (s *fakeStream) shutdown(read, write bool) {
	s.shut = append(s.shut, map[bool]string{true: "read", false: "write"}[read])
}
func (s *fakeStream) hungUp() bool   { return s.closed }
func (s *fakeStream) readable() bool { return false }
func (s *fakeStream) waitRead()      {}
func (s *fakeStream) waitHangUp()    {}
func (s *fakeStream) waitWrite()     {}
func (s *fakeStream) close()         { s.closed = true }

// A socket that takes a part, with an error or without, neither loses nor doubles a byte, and credit counts what it took.
func TestCaseB5PartialWrites(t *testing.T) {
	data := make([]byte, 4096)
	for i := range data {
		data[i] = byte(i * 3)
	}
	broken := errors.New("broken pipe")
	for _, c := range []struct {
		name    string
		writes  []fakeWrite
		pending []int // after the data and after each flush
		deaf    bool
	}{
		{"all", nil, []int{0}, false},
		{"part, then blocked", []fakeWrite{{3, errWouldBlock}}, []int{4093, 0}, false},
		{"nothing, then parts", []fakeWrite{{0, errWouldBlock}, {1, errWouldBlock}, {4000, errWouldBlock}}, []int{4096, 4095, 95, 0}, false},
		{"part, then an error", []fakeWrite{{3, broken}}, []int{0}, true},
		{"blocked, then an error", []fakeWrite{{5, errWouldBlock}, {5, broken}}, []int{4091, 0}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRouter("vsock0", 3, newHost(Config{}))
			s := &fakeStream{writes: c.writes}
			conn := &connection{router: r, phase: phaseOpen, stream: s, greet: true}
			conn.toHost(data[:2048])
			conn.toHost(data[2048:])
			for i, want := range c.pending {
				if i > 0 {
					conn.flush()
				}
				if len(conn.pending) != want {
					t.Errorf("%d bytes pending after flush %d, want %d", len(conn.pending), i, want)
				}
				if !c.deaf && conn.received.forwarded != uint32(len(s.got)) {
					t.Errorf("%d bytes counted as forwarded, %d are", conn.received.forwarded, len(s.got))
				}
			}
			r.host.goroutines.Wait()
			if conn.deaf != c.deaf || conn.received.forwarded != uint32(len(data)) {
				t.Errorf("deaf %v, forwarded %d", conn.deaf, conn.received.forwarded)
			}
			if string(s.got) != string(data[:len(s.got)]) || !c.deaf && len(s.got) != len(data) {
				t.Error("the data differs")
			}
		})
	}
}

// The OK line is no data of the guest: it takes no credit, even when the socket takes it in parts.
func TestGreetingInParts(t *testing.T) {
	r := newRouter("vsock0", 3, newHost(Config{}))
	s := &fakeStream{writes: []fakeWrite{{2, errWouldBlock}}}
	c := &connection{router: r, phase: phaseRequesting, stream: s, greet: true, readable: true, ports: portPair{host: firstPort}}
	c.opened()
	c.toHost([]byte("data"))
	c.flush()
	r.host.goroutines.Wait()
	if string(s.got) != "OK 1073741824\ndata" || c.received.forwarded != 4 || len(c.pending) != 0 {
		t.Errorf("host got %q, forwarded %d", s.got, c.received.forwarded)
	}
}

func TestSendCredit(t *testing.T) {
	const near = 0xffffffff - 100
	for _, c := range []struct {
		name   string
		credit sendCredit
		want   uint32
	}{
		{"unknown", sendCredit{}, 0},
		{"fresh", sendCredit{bufferSize: 256 << 10}, 256<<10 - packetOverhead},
		{"tiny buffer", sendCredit{bufferSize: 128}, 128},
		{"tiny buffer in use", sendCredit{bufferSize: 128, sent: 1, inFlight: []uint32{1}}, 0},
		{"wrapped", sendCredit{bufferSize: 64 << 10, sent: 400, forwarded: near, inFlight: []uint32{400}}, 64<<10 - 501 - 2*packetOverhead},
		{"full", sendCredit{bufferSize: 64 << 10, sent: 64 << 10, inFlight: []uint32{64 << 10}}, 0},
		{"nearly full", sendCredit{bufferSize: 64 << 10, sent: 62 << 10, inFlight: []uint32{64 << 10}}, 0},
		{"guest took more than was sent", sendCredit{bufferSize: 64 << 10, sent: 1, forwarded: 2}, 0},
		{"shrunk buffer", sendCredit{bufferSize: 10, sent: 5000}, 0},
		{"many small packets", sendCredit{bufferSize: 64 << 10, sent: 63, inFlight: make([]uint32, 63)}, 0},
	} {
		if got := c.credit.available(); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	c := sendCredit{bufferSize: 1 << 20, sent: near, forwarded: near}
	for range 10 {
		c.spend(100)
	}
	start := uint32(near)
	c.update(1<<20, start+350)
	if len(c.inFlight) != 7 {
		t.Errorf("%d packets in flight", len(c.inFlight))
	}
	for ; len(c.inFlight) > 0; c.forwarded++ {
		c.update(1<<20, c.forwarded)
	}
	if c.available() != 1<<20-packetOverhead && c.sent != c.forwarded-1 {
		t.Errorf("%+v", c)
	}
}
