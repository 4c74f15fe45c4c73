package proto

import (
	"bytes"
	"errors"
	"testing"
)

func TestWindow(t *testing.T) {
	w := NewWindow()
	got := make(chan int)
	go func() { got <- w.Wait(10) }()
	if err := w.Add(7); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != 7 {
		t.Fatalf("got credit of %d, want 7", n)
	}
	w.Use(7)
	go func() { got <- w.Wait(10) }()
	w.Close()
	if n := <-got; n != 0 {
		t.Fatalf("got credit of %d after close", n)
	}
	if err := w.Add(MaxCredit); err != nil {
		t.Fatal(err)
	}
	var violated *ProtocolError
	if err := w.Add(1); !errors.As(err, &violated) {
		t.Fatalf("error %v, want a protocol error for too much credit", err)
	}
}

func TestQueueHoldsThePeerToItsCredit(t *testing.T) {
	q := NewQueue(8)
	var violated *ProtocolError
	if err := q.Push([]byte("123456789")); !errors.As(err, &violated) {
		t.Fatalf("error %v for 9 bytes of 8", err)
	}
	if err := q.Push([]byte("12345678")); err != nil {
		t.Fatal(err)
	}
	if err := q.Push([]byte("9")); !errors.As(err, &violated) {
		t.Fatalf("error %v for the ninth byte", err)
	}
	p, ok := q.Pop(nil)
	if !ok || string(p) != "12345678" {
		t.Fatalf("popped %q, %v", p, ok)
	}
	if n := q.Consumed(1); n != 0 {
		t.Fatalf("credit of %d for one byte, want it saved up", n)
	}
	if n := q.Consumed(7); n != 8 {
		t.Fatalf("credit of %d, want 8", n)
	}
	q.End()
	if err := q.Push(nil); !errors.As(err, &violated) {
		t.Fatalf("error %v for data after the end", err)
	}
	if _, ok := q.Pop(p); ok || !q.Ended() {
		t.Fatal("no clean end")
	}
}

// A consumer that was closed swallows what was granted and no more.
func TestClosedQueue(t *testing.T) {
	q := NewQueue(4)
	q.Close()
	if err := q.Push([]byte("1234")); err != nil {
		t.Fatal(err)
	}
	if err := q.Push([]byte("5")); err == nil {
		t.Fatal("a closed queue takes bytes without end")
	}
	if _, ok := q.Pop(nil); ok || q.Ended() {
		t.Fatal("a closed queue gives data or ends cleanly")
	}
}

// A sender and a receiver with a window of a few bytes move a long stream.
func TestWindowAndQueueTogether(t *testing.T) {
	const size = 13
	w, q := NewWindow(), NewQueue(size)
	w.Add(size)
	want := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	go func() {
		for rest := want; len(rest) > 0; {
			n := w.Wait(len(rest))
			w.Use(n)
			if err := q.Push(rest[:n]); err != nil {
				t.Error(err)
				break
			}
			rest = rest[n:]
		}
		q.End()
	}()
	var got, p []byte
	for {
		var ok bool
		if p, ok = q.Pop(p); !ok {
			break
		}
		got = append(got, p...)
		if n := q.Consumed(len(p)); n > 0 {
			w.Add(n)
		}
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("got %d bytes, want %d equal ones", len(got), len(want))
	}
}
