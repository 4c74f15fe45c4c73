package stream

import (
	"bytes"
	"io"
	"strings"
	"testing"
)

// However it is cut, it is the same stream.
func TestPiecesDoNotMatter(t *testing.T) {
	const size = 100_003
	var sent bytes.Buffer
	if n, err := Send(&sent, New(5), size, 777); err != nil || n != size {
		t.Fatalf("%d bytes, %v", n, err)
	}
	c := NewChecker(5)
	if err := Receive(bytes.NewReader(sent.Bytes()), c, 1<<62, 0); err != nil || c.Count() != size {
		t.Errorf("%d bytes, %v", c.Count(), err)
	}
	whole := make([]byte, size)
	if _, err := io.ReadFull(New(5), whole); err != nil || !bytes.Equal(whole, sent.Bytes()) {
		t.Error("pieces are another stream than the whole")
	}
}

func TestWrongBytesAreFound(t *testing.T) {
	data := make([]byte, 5000)
	_, _ = New(1).Read(data)
	for name, wrong := range map[string][]byte{
		"lost":    append(bytes.Clone(data[:3001]), data[3002:]...),
		"doubled": append(bytes.Clone(data[:3001]), data[3000:]...),
	} {
		if err := Receive(bytes.NewReader(wrong), NewChecker(1), 1<<62, 0); err == nil || !strings.Contains(err.Error(), "wrong byte at 3001") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
