package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit/stream"
)

// order is the first line on a connection to a peer: what the guest does with it.
type order struct {
	ID uint64
	// Call has it done on a connection that the guest makes to this port of the
	// host, instead of this one.
	Call uint32 `json:",omitempty"`
	// Steps are done one after the other. Then the connection is closed.
	Steps []step
}

// step sends or receives bytes of package stream, or both at once.
type step struct {
	Sleep time.Duration `json:",omitempty"` // before
	// Send so many bytes of the stream with this seed, in pieces of random sizes up to
	// Chunk; CloseWrite says that no more will come.
	Send       int64  `json:",omitempty"`
	Seed       uint64 `json:",omitempty"`
	Chunk      int    `json:",omitempty"`
	CloseWrite bool   `json:",omitempty"`
	// Receive so many bytes of the stream with the seed From, or up to the end, with a
	// pause after each 64 KiB.
	Receive int64         `json:",omitempty"`
	From    uint64        `json:",omitempty"`
	Pause   time.Duration `json:",omitempty"`
}

// outcome is what became of an order, one line of standard output.
type outcome struct {
	ID       uint64
	Sent     int64
	Received int64
	// Error of sending and of receiving. Broken: the first is that of a connection
	// whose other end has gone.
	SendError, ReceiveError string
	Broken                  bool
}

// peer does as it is ordered on connections to its vsock port.
func peer(args []string) error {
	flags := flag.NewFlagSet("peer", flag.ContinueOnError)
	port := flags.Uint("port", 7200, "vsock port to listen on")
	if err := flags.Parse(args); err != nil {
		return err
	}
	listener, err := listenVsock(uint32(*port))
	if err != nil {
		return err
	}
	var mu sync.Mutex
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(outcome{}); err != nil { // it listens
		return err
	}
	for {
		fd, err := acceptVsock(listener)
		if err != nil {
			return err
		}
		go func() {
			o, err := take(fd)
			if err != nil {
				o.ReceiveError = err.Error()
			}
			mu.Lock()
			defer mu.Unlock()
			_ = out.Encode(o)
		}()
	}
}

// take reads an order and carries it out.
func take(fd int) (outcome, error) {
	conn := os.NewFile(uintptr(fd), "vsock")
	defer func() { conn.Close() }()
	// Whoever orders waits for the guest's line before it sends more, so that nothing
	// else is in the buffer.
	line, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		return outcome{}, err
	}
	var o order
	if err := json.Unmarshal(line, &o); err != nil {
		return outcome{}, err
	}
	if o.Call != 0 {
		called, err := dialVsock(o.Call)
		conn.Close()
		if err != nil {
			return outcome{ID: o.ID}, err
		}
		conn = called
	} else if _, err := conn.Write([]byte{'\n'}); err != nil {
		return outcome{ID: o.ID}, err
	}
	result := outcome{ID: o.ID}
	for _, s := range o.Steps {
		s.do(conn, &result)
	}
	return result, nil
}

func (s step) do(conn *os.File, result *outcome) {
	time.Sleep(s.Sleep)
	var both sync.WaitGroup
	both.Go(func() {
		if s.Send > 0 {
			sent, err := stream.Send(conn, stream.New(s.Seed), s.Send, max(s.Chunk, 1))
			result.Sent += sent
			if err != nil {
				result.SendError = err.Error()
				result.Broken = errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
			}
		}
		if s.CloseWrite {
			_ = unix.Shutdown(int(conn.Fd()), unix.SHUT_WR)
		}
	})
	if s.Receive > 0 {
		c := stream.NewChecker(s.From)
		if err := stream.Receive(conn, c, s.Receive, s.Pause); err != nil {
			result.ReceiveError = err.Error()
		}
		result.Received += c.Count()
	}
	both.Wait()
}

// dialVsock connects to a port of the host.
func dialVsock(port uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_HOST, Port: port}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect: %w", err)
	}
	return os.NewFile(uintptr(fd), "vsock"), nil
}

// storm opens connections to the host, so many each second, until it is killed.
// Every third is refused, and the others end with data on the way: both ends send
// resets.
func storm(args []string) error {
	flags := flag.NewFlagSet("storm", flag.ContinueOnError)
	port := flags.Uint("port", 0, "port of the host that echoes")
	refused := flags.Uint("refused", 9999, "port of the host that nobody serves")
	rate := flags.Int("rate", 200, "connections a second")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for i := 0; ; i++ {
		to := uint32(*port)
		if i%3 == 0 {
			to = uint32(*refused)
		}
		if conn, err := dialVsock(to); err == nil {
			_, _ = io.WriteString(conn, "on its way when the connection ends")
			conn.Close()
		}
		time.Sleep(time.Second / time.Duration(*rate))
	}
}
