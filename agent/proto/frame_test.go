package proto

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite golden files")

func TestHeader(t *testing.T) {
	tests := []struct {
		name  string
		bytes string
		want  Header
		err   string
	}{
		{"hello", "0100000002000000", Header{Type: TypeHello, Length: 2}, ""},
		{"end of stdout", "1001020000000000", Header{TypeData, FlagEnd, Stdout, 0}, ""},
		{"largest data", "1000010000000100", Header{TypeData, 0, Stdin, MaxData}, ""},
		{"too much data", "1000010001000100", Header{}, "data frame of 65537 bytes"},
		{"largest control", "0200000000001000", Header{Type: TypeRequest, Length: MaxControl}, ""},
		{"too large control", "0200000001001000", Header{}, "request frame of 1048577 bytes"},
		{"credit of wrong size", "1100010003000000", Header{}, "credit frame of 3 bytes"},
		{"unknown mandatory type", "7f00000000000000", Header{}, "unknown frame"},
		{"unknown mandatory flag", "1002010000000000", Header{}, "unknown flags 0x2"},
		{"unknown optional flag", "1010010000000000", Header{TypeData, 0x10, Stdin, 0}, ""},
		{"unknown optional type", "800f000005000000", Header{0x80, 0x0f, 0, 5}, ""},
		{"too large optional type", "80000000ffffffff", Header{}, "at most"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b [HeaderSize]byte
			hex.Decode(b[:], []byte(tt.bytes))
			h, err := ParseHeader(b)
			if tt.err != "" {
				var violated *ProtocolError
				if !errors.As(err, &violated) || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want a protocol error with %q", err, tt.err)
				}
				return
			}
			if err != nil || h != tt.want {
				t.Fatalf("got %+v, %v, want %+v", h, err, tt.want)
			}
			var again [HeaderSize]byte
			h.Put(again[:])
			if again != b {
				t.Fatalf("encodes as %x, want %x", again, b)
			}
		})
	}
}

// The bytes of a whole conversation are what agents in old snapshots speak.
func TestGoldenConversation(t *testing.T) {
	var b []byte
	add := func(next []byte, err error) {
		if err != nil {
			t.Fatal(err)
		}
		b = next
	}
	add(AppendJSON(b, TypeHello, Hello{Protocol: Name, Min: 1, Max: 1, Speaks: 1}))
	add(AppendJSON(b, TypeRequest, Request{Op: OpExec, OperationID: "op-1", Generation: "g", Requires: []string{"pty"}, Params: []byte(`{"args":["true"]}`)}))
	add(AppendJSON(b, TypeStarted, Started{OperationID: "op-1", PID: 7, Containment: ContainmentCgroup}))
	b = AppendCredit(b, Stdin, 65536, 0)
	b = Append(b, TypeData, 0, Stdin, []byte("hi\n"))
	b = Append(b, TypeData, FlagEnd, Stdin, nil)
	b = AppendCredit(b, Stdout, 0, FlagEnd)
	add(AppendJSON(b, TypeControl, Control{Signal: 15}))
	add(AppendJSON(b, TypeResult, ExecResult{ExitCode: 143, Signal: 15, Containment: ContainmentCgroup}))
	add(AppendJSON(b, TypeError, Error{Code: CodeTooManyOperations, Message: "m", Retryable: true}))
	golden(t, "testdata/conversation.golden", hex.Dump(b))
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; got:\n%s", path, got)
	}
}

func TestOptionalFramesAreSkipped(t *testing.T) {
	b := Append(nil, 0x80, 0x0f, 3, make([]byte, 10_000))
	b = Append(b, 0xff, 0, 0, nil)
	b = Append(b, TypeData, 0, Stdout, []byte("data"))
	c := NewConn(&pipe{Reader: bytes.NewReader(b)})
	h, err := c.Next()
	if err != nil || h.Type != TypeData {
		t.Fatalf("got %+v, %v", h, err)
	}
	p, err := c.Payload(h, nil)
	if err != nil || string(p) != "data" {
		t.Fatalf("got %q, %v", p, err)
	}
	if _, err := c.Next(); err != io.EOF {
		t.Fatalf("error %v at the end, want EOF", err)
	}
}

func TestCutFrame(t *testing.T) {
	whole := Append(nil, TypeData, 0, Stdout, []byte("data"))
	for n := 1; n < len(whole); n++ {
		c := NewConn(&pipe{Reader: bytes.NewReader(whole[:n])})
		h, err := c.Next()
		if err == nil {
			_, err = c.Payload(h, nil)
		}
		if err != io.ErrUnexpectedEOF {
			t.Errorf("cut after %d bytes: error %v, want unexpected EOF", n, err)
		}
	}
}

type pipe struct{ io.Reader }

func (*pipe) Write(p []byte) (int, error) { return len(p), nil }

func TestTooLargeMessage(t *testing.T) {
	if _, err := AppendJSON(nil, TypeRequest, strings.Repeat("x", MaxControl)); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("error %v, want ErrTooLarge", err)
	}
}

// FuzzConn reads hostile bytes as either side would.
func FuzzConn(f *testing.F) {
	f.Add(Append(nil, TypeData, FlagEnd, Stdout, []byte("x")))
	f.Add(AppendCredit(nil, Stdin, 1<<31, 0))
	f.Add(Append(nil, TypeRequest, 0, 0, []byte(`{"op":"exec","params":{"args":["a",{"base64":"/w=="}]}}`)))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := NewConn(&pipe{Reader: bytes.NewReader(b)})
		q, w := NewQueue(1000), NewWindow()
		for {
			h, err := c.Next()
			if err != nil {
				return
			}
			switch h.Type {
			case TypeData:
				p, err := c.Payload(h, nil)
				if err != nil {
					return
				}
				if len(p) > MaxData {
					t.Fatalf("payload of %d bytes", len(p))
				}
				if q.Push(p) != nil {
					return
				}
			case TypeCredit:
				n, err := c.Credit(h)
				if err != nil || w.Add(n) != nil {
					return
				}
			case TypeHello:
				var v Hello
				if c.JSON(h, &v) == nil {
					v.Check()
					v.Common(MinVersion, MaxVersion)
				}
			case TypeRequest:
				var v Request
				if c.JSON(h, &v) == nil {
					decode(h.Type, v.Params, &ExecRequest{})
					decode(h.Type, v.Params, &PutRequest{})
					decode(h.Type, v.Params, &RenewRequest{})
				}
			default:
				var v ExecResult
				c.JSON(h, &v)
			}
		}
	})
}
