package main

import (
	"crypto/sha256"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// probes are small programs that a test runs in the guest by name.
var probes = map[string]func(args []string) error{
	"draw":      draw,
	"flow":      flow,
	"datagrams": datagrams,
	"hold":      hold,
	"queries":   queries,
	"scatter":   scatter,
	"transfer":  transfer,
	"attach":    attach,
	"attempts":  attempts,
	"connect":   connect,
	"hog":       hog,
	"immutable": immutable,
	"now":       now,
	"offloads":  offloads,
	"peer":      peer,
	"random":    random,
	"sniff":     sniff,
	"storm":     storm,
	"tls":       handshakes,
	"traces":    traces,
	"spawn":     spawn,
}

// now prints the wall clock in nanoseconds.
func now([]string) error {
	_, err := fmt.Println(time.Now().UnixNano())
	return err
}

// traces leaves something in those places of a kernel that no shell command
// reaches: System V shared memory, and a key of the user.
func traces([]string) error {
	id, err := unix.SysvShmGet(0x7ace, 1<<16, unix.IPC_CREAT|0o600)
	if err != nil {
		return fmt.Errorf("create shared memory: %w", err)
	}
	memory, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		return fmt.Errorf("attach shared memory: %w", err)
	}
	copy(memory, "trace")
	if err := unix.SysvShmDetach(memory); err != nil {
		return fmt.Errorf("detach shared memory: %w", err)
	}
	if _, err := unix.AddKey("user", "trace", []byte("trace"), unix.KEY_SPEC_USER_KEYRING); err != nil {
		return fmt.Errorf("add key: %w", err)
	}
	return nil
}

// draw takes 16 bytes of the kernel's randomness again and again and appends
// them to a file. Each line says under which generation the guest was before
// the draw, so that draws after a renewal can be told from those before, and the
// monotonic time after it, which tells draws of two clones from one draw in
// their common past.
func draw(args []string) error {
	flags := flag.NewFlagSet("draw", flag.ContinueOnError)
	to := flags.String("to", "/dev/shm/random", "file to append to")
	generation := flags.String("generation", "/run/forkvm/generation", "file with the generation")
	if err := flags.Parse(args); err != nil {
		return err
	}
	f, err := os.OpenFile(*to, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	var value [16]byte
	for {
		under, err := os.ReadFile(*generation)
		if err != nil {
			return err
		}
		if n, err := unix.Getrandom(value[:], 0); err != nil || n != len(value) {
			return fmt.Errorf("getrandom: %d bytes, %w", n, err)
		}
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(f, "%s %x %d\n", strings.TrimSpace(string(under)), value, now.Nano()); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// connect sends bytes to a vsock port of the host, which sends them back, and
// prints the checksum of what came.
func connect(args []string) error {
	flags := flag.NewFlagSet("connect", flag.ContinueOnError)
	port := flags.Uint("port", 0, "port of the host")
	size := flags.Int("bytes", 1<<20, "how much to send")
	if err := flags.Parse(args); err != nil {
		return err
	}
	conn, err := dialVsock(uint32(*port))
	if err != nil {
		return err
	}
	defer conn.Close()
	data := make([]byte, *size)
	fill(data, 7, uint64(*size))
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	got := make([]byte, *size)
	if _, err := io.ReadFull(conn, got); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if err := <-sent; err != nil {
		return fmt.Errorf("write: %w", err)
	}
	want, have := sha256.Sum256(data), sha256.Sum256(got)
	if want != have {
		return fmt.Errorf("sent %x, got back %x", want, have)
	}
	_, err = fmt.Println(hex.EncodeToString(have[:]))
	return err
}
