package platform

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

// port is how a driver sees the chip.
type port struct {
	t   testing.TB
	s   *Serial
	irq *virtiotest.Interrupt
}

func (p port) in(register uint64) byte {
	var b [1]byte
	p.s.Read(register, b[:])
	return b[0]
}

func (p port) out(register uint64, value byte) { p.s.Write(register, []byte{value}) }

func (p port) want(what string, register uint64, want byte) {
	p.t.Helper()
	if got := p.in(register); got != want {
		p.t.Errorf("%s: register %d is %#02x, want %#02x", what, register, got, want)
	}
}

// edges returns how many edges came since the last call.
func (p *port) edges(f func()) uint64 {
	before := p.irq.Count()
	f()
	return p.irq.Count() - before
}

func newPort(t testing.TB, config SerialConfig) port {
	t.Helper()
	irq := virtiotest.NewInterrupt()
	config.Interrupt = irq
	s, err := NewSerial(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	return port{t, s, irq}
}

// The steps by which Linux's 8250 driver finds out that the port is there and a 16550A, and nothing later.
func TestLinuxAutoconfiguration(t *testing.T) {
	p := newPort(t, SerialConfig{})
	p.out(1, 0)
	p.want("interrupts off", 1, 0)
	p.out(1, 0x0f)
	p.want("interrupts on", 1, 0x0f)
	p.out(1, 0x40)
	p.want("no XScale unit enable", 1, 0)

	p.out(4, 0x10|0x08|0x02) // loopback, OUT2, RTS
	if got := p.in(6) & 0xf0; got != 0x90 {
		t.Errorf("modem status in loopback is %#02x, want DCD and CTS", got)
	}
	p.out(4, 0)
	if got := p.in(6) & 0xf0; got != 0xb0 {
		t.Errorf("modem status is %#02x", got)
	}

	p.out(3, 0xbf) // the key to a 16650's extra registers
	p.out(2, 0)
	p.out(3, 0)
	p.out(2, 0x01)
	if got := p.in(2) >> 6; got != 3 {
		t.Errorf("IIR>>6 is %d, want 3 for a working FIFO", got)
	}
	p.out(2, 0x01|0x20) // a 16750's 64-byte FIFO
	if got := p.in(2) & 0x20; got != 0 {
		t.Error("the chip looks like a 16750")
	}
	p.out(7, 0x5a)
	p.want("scratch", 7, 0x5a)
	p.out(3, 0x83)
	p.out(0, 0x34)
	p.out(1, 0x12)
	p.want("divisor, low", 0, 0x34)
	p.want("divisor, high", 1, 0x12)
	p.out(3, 0x03)
	p.want("interrupts behind the divisor", 1, 0)
}

// Linux enables the transmit interrupt twice and expects it each time, or takes the chip for a broken one.
func TestTransmitInterrupt(t *testing.T) {
	p := newPort(t, SerialConfig{})
	for range 2 {
		if n := p.edges(func() { p.out(1, 0x02) }); n != 1 {
			t.Errorf("%d edges for enabling", n)
		}
		p.want("pending", 2, 0x02)
		p.want("acknowledged", 2, 0x01)
		p.out(1, 0)
	}
	p.want("transmitter empty", 5, 0x60)
	p.out(1, 0x02)
	p.in(2)
	if n := p.edges(func() {
		for range 16 {
			p.out(0, 'x')
		}
	}); n != 1 {
		t.Errorf("%d edges for a burst", n)
	}
	if got := string(p.s.Console().Bytes()); got != strings.Repeat("x", 16) {
		t.Errorf("console has %q", got)
	}
}

func TestReceive(t *testing.T) {
	p := newPort(t, SerialConfig{})
	p.out(2, 0x81) // FIFO, trigger at 8
	p.out(1, 0x05)
	if n := p.edges(func() { p.s.Input([]byte("ab")) }); n != 1 {
		t.Errorf("%d edges", n)
	}
	p.want("below the trigger", 2, 0xcc)
	p.want("data ready", 5, 0x61)
	p.s.Input([]byte("cdefgh"))
	p.want("at the trigger", 2, 0xc4)
	for _, c := range "abcdefgh" {
		p.want("data", 0, byte(c))
	}
	p.want("nothing", 5, 0x60)
	p.want("no interrupt", 2, 0xc1)
	p.want("no data", 0, 0)

	// Clearing the FIFO loses what the chip holds, not what is on the line behind it.
	p.s.Input(bytes.Repeat([]byte("0123456789"), 3))
	p.out(2, 0x83)
	p.want("after the clear", 0, '6')

	// A paused device takes input and keeps quiet; Resume makes up for it.
	for p.in(5)&1 != 0 {
		p.in(0)
	}
	p.s.Pause()
	if n := p.edges(func() { p.s.Input([]byte("x")) }); n != 0 {
		t.Errorf("%d edges while paused", n)
	}
	if n := p.edges(func() { p.s.Resume(); p.s.Resume() }); n != 1 {
		t.Errorf("%d edges from resume", n)
	}
}

func TestPriorityAndLoopback(t *testing.T) {
	p := newPort(t, SerialConfig{})
	p.out(2, 0x01)
	p.out(4, 0x10)
	p.in(6)
	p.out(1, 0x0f)
	for range fifoDepth + 1 {
		p.out(0, 'l')
	}
	p.out(4, 0x10|0x01)
	p.want("line status first", 2, 0xc6)
	p.want("overrun", 5, 0x63)
	p.want("then data", 2, 0xc4)
	if _, err := p.s.Input([]byte("x")); !errors.Is(err, ErrInputFull) {
		t.Errorf("input in loopback: %v", err)
	}
	for range fifoDepth {
		p.want("looped data", 0, 'l')
	}
	p.want("then the transmitter", 2, 0xc2)
	p.want("then the modem", 2, 0xc0)
	p.want("DSR rose", 6, 0x22)
	p.want("nothing", 2, 0xc1)
	if p.s.Console().Total() != 0 {
		t.Error("looped bytes were printed")
	}
}

// F4: input is bounded, and a writer that waits goes on when the guest reads.
func TestInputIsBounded(t *testing.T) {
	p := newPort(t, SerialConfig{})
	n, err := p.s.Input(make([]byte, 1<<20))
	if n != inputLimit || !errors.Is(err, ErrInputFull) {
		t.Errorf("%d bytes taken, %v", n, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if n, err := p.s.InputContext(ctx, []byte("x")); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%d bytes, %v", n, err)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if n, err := p.s.InputContext(context.Background(), data); n != len(data) || err != nil {
				t.Errorf("%d bytes, %v", n, err)
			}
		})
	}
	for got := 0; got < inputLimit+2*len(data); {
		if p.in(5)&1 != 0 {
			p.in(0)
			got++
		}
	}
	wg.Wait()
	go p.s.Close()
	if _, err := p.s.InputContext(context.Background(), make([]byte, 2*inputLimit)); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if _, err := p.s.Input([]byte("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// writer is an output that can block and fail.
type writer struct {
	mu    sync.Mutex
	got   bytes.Buffer
	err   error
	block chan struct{}
}

func (w *writer) Write(p []byte) (int, error) {
	if w.block != nil {
		<-w.block
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return 0, w.err
	}
	return w.got.Write(p)
}

func TestOutput(t *testing.T) {
	w := &writer{}
	p := newPort(t, SerialConfig{Output: w})
	for _, c := range []byte("hello\x00\xff") {
		p.out(0, c)
	}
	if err := p.s.Close(); err != nil {
		t.Fatal(err)
	}
	if w.got.String() != "hello\x00\xff" {
		t.Errorf("output is %q", w.got.String())
	}
	if n, err := p.s.Dropped(); n != 0 || err != nil {
		t.Errorf("%d dropped, %v", n, err)
	}
}

// What was printed before the console begins is nobody's.
func TestBegin(t *testing.T) {
	w := &writer{}
	p := newPort(t, SerialConfig{})
	p.out(0, 'a')
	p.s.Begin(w)
	if n := p.s.Console().Total(); n != 0 {
		t.Errorf("the console has %d bytes", n)
	}
	p.out(0, 'b')
	if err := p.s.Close(); err != nil {
		t.Fatal(err)
	}
	if got := string(p.s.Console().Bytes()); got != "b" || w.got.String() != "b" {
		t.Errorf("the console has %q, the output %q", got, w.got.String())
	}
}

// F4: an output that blocks or fails costs the guest nothing and the host little; the newest bytes survive.
func TestSlowOutput(t *testing.T) {
	w := &writer{block: make(chan struct{})}
	p := newPort(t, SerialConfig{Output: w})
	const total = 4 * OutputBuffer
	for i := range total {
		p.out(0, byte(i>>8))
	}
	close(w.block)
	if err := p.s.Close(); err != nil {
		t.Fatal(err)
	}
	dropped, _ := p.s.Dropped()
	if got := w.got.Len(); uint64(got)+dropped != total || got < OutputBuffer || got > 3*OutputBuffer {
		t.Errorf("%d of %d bytes written, %d dropped", got, total, dropped)
	}
	if last := w.got.Bytes()[w.got.Len()-1]; last != byte((total-1)>>8&0xff) {
		t.Errorf("last byte is %#x", last)
	}

	w = &writer{err: errors.New("no space left on device")}
	p = newPort(t, SerialConfig{Output: w})
	p.out(0, 'x')
	p.s.Close()
	if n, err := p.s.Dropped(); n != 1 || err != w.err {
		t.Errorf("%d dropped, %v", n, err)
	}
}

func TestCloseWithBlockedOutput(t *testing.T) {
	old := closeTimeout
	closeTimeout = 20 * time.Millisecond
	t.Cleanup(func() { closeTimeout = old })
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	p := newPort(t, SerialConfig{Output: w})
	for range 2 * OutputBuffer {
		p.out(0, 'x')
	}
	if err := p.s.Close(); !errors.Is(err, ErrOutputBlocked) {
		t.Error(err)
	}
	if err := p.s.Close(); !errors.Is(err, ErrOutputBlocked) {
		t.Error(err)
	}
}

// A state leads to the same chip, twice over, and a clone does not print what its parent printed.
func TestSerialState(t *testing.T) {
	p := newPort(t, SerialConfig{})
	p.out(3, 0x80)
	p.out(0, 0x0c)
	p.out(1, 0x01)
	p.out(3, 0x1b)
	p.out(2, 0xc1)
	p.out(4, 0x0b)
	p.out(7, 0x77)
	p.out(1, 0x07)
	p.out(0, 'o')
	p.s.Input([]byte("typed"))
	p.s.Pause()
	state, err := p.s.Save()
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/serial_state.json")
	if err != nil || string(bytes.TrimSpace(want)) != string(state) {
		t.Errorf("state is\n%s\nwant\n%s%v", state, want, err)
	}
	irq := virtiotest.NewInterrupt()
	s, err := NewSerial(SerialConfig{Interrupt: irq, State: state})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if again, _ := s.Save(); string(again) != string(state) {
		t.Errorf("saved again:\n%s\nwas\n%s", again, state)
	}
	if err := s.Resume(); err != nil || irq.Count() != 1 {
		t.Errorf("%d edges from resume, %v", irq.Count(), err)
	}
	if s.Console().Total() != 0 {
		t.Error("output came with the state")
	}
	q := port{t, s, irq}
	q.want("identification", 2, 0xcc)
	q.want("input", 0, 't')
}

func TestSerialStateRefuses(t *testing.T) {
	long, _ := json.Marshal(map[string]any{"version": 1, "input": make([]byte, inputLimit+fifoDepth+1)})
	for _, state := range []string{"", "x", "{}", "null", "[]", `{"version":2}`, `{"version":1,"more":1}`, `{"version":1}{}`,
		`{"version":1,"scratch":256}`, string(long)} {
		if s, err := NewSerial(SerialConfig{Interrupt: virtiotest.NewInterrupt(), State: []byte(state)}); err == nil {
			t.Errorf("%.40q: accepted", state)
			s.Close()
		}
	}
}

// F3: any access of any width.
func FuzzSerial(f *testing.F) {
	f.Add([]byte{0x13, 0x41, 0x21, 0xff, 0x02, 0x81})
	f.Fuzz(func(t *testing.T, ops []byte) {
		p := newPort(t, SerialConfig{})
		for len(ops) >= 2 {
			register, width, value := uint64(ops[0]&7), 1<<(ops[0]>>3&3), ops[1]
			data := bytes.Repeat([]byte{value}, width)
			switch ops[0] >> 5 & 3 {
			case 0:
				p.s.Read(register, data)
			case 1:
				p.s.Write(register, data)
			default:
				p.s.Input(data)
			}
			ops = ops[2:]
		}
		p.s.Pause()
		state, err := p.s.Save()
		if err != nil {
			t.Fatal(err)
		}
		s, err := NewSerial(SerialConfig{Interrupt: virtiotest.NewInterrupt(), State: state})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if again, _ := s.Save(); string(again) != string(state) {
			t.Errorf("saved again:\n%s\nwas\n%s", again, state)
		}
	})
}

func FuzzSerialState(f *testing.F) {
	f.Add([]byte(`{"version":1,"interrupt_enable":5,"fifo_control":193,"input":"dHlwZWQ="}`))
	f.Fuzz(func(t *testing.T, state []byte) {
		s, err := NewSerial(SerialConfig{Interrupt: virtiotest.NewInterrupt(), State: state})
		if err != nil {
			return
		}
		defer s.Close()
		s.Resume()
		var data [8]byte
		s.Read(0, data[:])
	})
}

func TestConsole(t *testing.T) {
	var c Console
	put := func(s string) {
		for i := range len(s) {
			c.put(s[i])
		}
	}
	if c.LastLines(3) != nil {
		t.Error("lines of nothing")
	}
	put("one\r\ntwo\r\n\r\nthree")
	if got := strings.Join(c.LastLines(3), "|"); got != "two||three" {
		t.Errorf("last lines are %q", got)
	}
	if got := strings.Join(c.LastLines(30), "|"); got != "one|two||three" {
		t.Errorf("last lines are %q", got)
	}
	put(strings.Repeat("x", ConsoleSize) + "\nend\n")
	if got := c.LastLines(1); len(got) != 1 || got[0] != "end" {
		t.Errorf("last line is %q", got)
	}
	if got := c.Bytes(); len(got) != ConsoleSize || !bytes.HasSuffix(got, []byte("x\nend\n")) {
		t.Errorf("%d bytes kept", len(got))
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain\tüber\n":      "plain\tüber\n",
		"a\r\nb\rc":          "a\nb\\x0dc",
		"\x1b[2J\x07\x00":    `\x1b[2J\x07\x00`,
		"\xff\xfe\x80":       `\xff\xfe\x80`,
		"\u009b31m\u202eabc": `\u009b31m\u202eabc`,
		"\U000e0001":         `\U000e0001`,
		"\x7f":               `\x7f`,
		"\ufffd":             "\ufffd",
	} {
		if got := Printable([]byte(in)); got != want {
			t.Errorf("%q is shown as %q, want %q", in, got, want)
		}
	}
}

func TestLogFile(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/log")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteString("before|")
	l, err := NewLogFile(f, 1000)
	if err != nil {
		t.Fatal(err)
	}
	var all bytes.Buffer
	all.WriteString("before|")
	for i := range 500 {
		line := []byte(strings.Repeat("0123456789", i%7) + "\n")
		all.Write(line)
		if n, err := l.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
		got, err := os.ReadFile(f.Name())
		if err != nil || len(got) > 1000 || !bytes.HasSuffix(all.Bytes(), got) || all.Len() > 1000 && len(got) < 500 {
			t.Fatalf("after %d lines %d of %d bytes, %v", i, len(got), all.Len(), err)
		}
	}
	big := bytes.Repeat([]byte("abcdefghi\n"), 1000)
	if n, err := l.Write(big); n != len(big) || err != nil {
		t.Fatal(n, err)
	}
	if got, _ := os.ReadFile(f.Name()); len(got) > 1000 || len(got) < 500 || !bytes.HasSuffix(big, got) {
		t.Errorf("%d bytes", len(got))
	}
}

func TestSerialContract(t *testing.T) {
	virtiotest.CheckLeaks(t)
	contract(t, func(state []byte) (devices.Device, error) {
		return NewSerial(SerialConfig{Interrupt: virtiotest.NewInterrupt(), Output: &writer{}, State: state})
	})
}
