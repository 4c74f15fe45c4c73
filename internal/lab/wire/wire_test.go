package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
)

func TestFrameBytes(t *testing.T) {
	var buf bytes.Buffer
	if err := NewWriter(&buf).Write(Stdout, 0x01020304, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	const want = "070000000403020102000000" + "6869"
	if got := hex.EncodeToString(buf.Bytes()); got != want {
		t.Errorf("frame is %s, want %s", got, want)
	}
}

func TestFramesComeBack(t *testing.T) {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	command := Command{Argv: []string{"a", "b"}, Env: []string{"X=1"}, Stdin: true}
	big := bytes.Repeat([]byte("x"), 200_000)
	if err := w.WriteJSON(Start, 7, command); err != nil {
		t.Fatal(err)
	}
	if n, err := w.Stream(Stderr, 7).Write(big); n != len(big) || err != nil {
		t.Fatalf("wrote %d bytes, %v; want %d", n, err, len(big))
	}
	frame, err := Read(&buf)
	if err != nil {
		t.Fatal(err)
	}
	var got Command
	if err := frame.JSON(&got); err != nil || frame.Type != Start || frame.ID != 7 || !reflect.DeepEqual(got, command) {
		t.Errorf("read type %d, id %d, %+v, %v; want what was written", frame.Type, frame.ID, got, err)
	}
	var stream []byte
	for {
		frame, err := Read(&buf)
		if err == io.EOF {
			break
		}
		if err != nil || frame.Type != Stderr || frame.ID != 7 {
			t.Fatalf("read type %d, id %d, %v; want pieces of the stream", frame.Type, frame.ID, err)
		}
		stream = append(stream, frame.Payload...)
	}
	if !bytes.Equal(stream, big) {
		t.Errorf("stream of %d bytes came back as %d, or changed", len(big), len(stream))
	}
}

func TestReadRefuses(t *testing.T) {
	for _, test := range []struct{ name, bytes, want string }{
		{"type 0", "000000000000000000000000", "bad header"},
		{"unknown type", "ff0000000000000000000000", "bad header"},
		{"reserved bytes", "070000010000000000000000", "bad header"},
		{"too long", "070000000000000001001000", "more than"},
		{"cut header", "0700", "header"},
		{"cut payload", "07000000000000000200000061", "payload"},
	} {
		raw, err := hex.DecodeString(test.bytes)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Read(bytes.NewReader(raw)); err == nil || errors.Is(err, io.EOF) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.name, err, test.want)
		}
	}
}

func FuzzRead(f *testing.F) {
	var buf bytes.Buffer
	if err := NewWriter(&buf).WriteJSON(Exit, 3, Outcome{Code: 1, Left: []string{"12 sleep"}}); err != nil {
		f.Fatal(err)
	}
	f.Add(buf.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		for {
			frame, err := Read(r)
			if err != nil {
				return
			}
			if len(frame.Payload) > MaxPayload {
				t.Fatalf("payload of %d bytes", len(frame.Payload))
			}
			var again bytes.Buffer
			if err := NewWriter(&again).Write(frame.Type, frame.ID, frame.Payload); err != nil {
				t.Fatalf("cannot write what was read: %v", err)
			}
		}
	})
}
