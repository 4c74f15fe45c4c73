// Command guestload is what a guest does while tests snapshot, restore and fork
// it: it computes, keeps patterns in memory and on disk, sleeps on every CPU and
// echoes on a vsock port, and checks all of it all the time. It ends with an
// error at the first wrong byte, missing tick or failed operation. Every worker
// leaves some time to the others: an emulated processor has none to spare.
//
// Once each 50 ms it replaces the status file, one line of JSON, so that a test
// sees that everything goes on.
//
// With the name of a probe as first argument it does one small thing instead
// that tests need in a guest: draw (randomness), connect (to the host), peer and
// storm (connections), spawn (servers), tls (handshakes), random (disk writes), hog
// (memory), immutable (files), traces (in the kernel), attach (to other processes), attempts, flow, datagrams, hold,
// transfer, offloads, queries, scatter and sniff (on the network), now.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Status is the content of the status file: how often each worker has completed
// a round.
type Status struct {
	CPU    uint64   `json:"cpu"`
	Memory uint64   `json:"memory"`
	Disk   uint64   `json:"disk"`
	Vsock  uint64   `json:"vsock"`
	Ticks  []uint64 `json:"ticks"` // by CPU
}

type load struct {
	cpu, memory, disk, vsock atomic.Uint64
	ticks                    []atomic.Uint64
}

func main() {
	if len(os.Args) > 1 && probes[os.Args[1]] != nil {
		if err := probes[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "guestload:", err)
			os.Exit(1)
		}
		return
	}
	dir := flag.String("dir", "/var/tmp/guestload", "directory for files on the disk under test")
	status := flag.String("status", "/run/guestload.json", "status file")
	port := flag.Uint("port", 7000, "vsock port that echoes")
	megabytes := flag.Int("memory", 16, "MiB of patterned memory")
	flag.Parse()
	if err := run(*dir, *status, uint32(*port), *megabytes); err != nil {
		fmt.Fprintln(os.Stderr, "guestload:", err)
		os.Exit(1)
	}
}

func run(dir, status string, port uint32, megabytes int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	l := &load{ticks: make([]atomic.Uint64, runtime.NumCPU())}
	failed := make(chan error, 1)
	fail := func(err error) {
		select {
		case failed <- err:
		default:
		}
	}
	var once sync.Once
	start := func(name string, f func() error) {
		go func() {
			err := f()
			once.Do(func() { fail(fmt.Errorf("%s: %w", name, err)) })
		}()
	}
	start("cpu", l.compute)
	start("memory", func() error { return l.patterns(megabytes) })
	start("disk", func() error { return l.files(dir) })
	start("vsock", func() error { return l.echo(port) })
	for i := range l.ticks {
		start(fmt.Sprintf("timer of cpu %d", i), func() error { return l.tick(i) })
	}
	for {
		select {
		case err := <-failed:
			return err
		case <-time.After(50 * time.Millisecond):
		}
		if err := l.report(status); err != nil {
			return err
		}
	}
}

// compute hashes the same chain in every round, so that each must give the same
// sum.
func (l *load) compute() error {
	var want [32]byte
	for {
		var sum [32]byte
		for range 500 {
			sum = sha256.Sum256(sum[:])
		}
		if n := l.cpu.Add(1); n == 1 {
			want = sum
		} else if sum != want {
			return fmt.Errorf("round %d computed %x, not %x", n, sum, want)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

const page = 4096

// patterns keeps pages that say which page and which version they are.
func (l *load) patterns(megabytes int) error {
	pages := megabytes << 20 / page
	memory := make([]byte, pages*page)
	versions := make([]uint64, pages)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range pages {
		fill(memory[i*page:][:page], uint64(i), 0)
	}
	want := make([]byte, page)
	for {
		for range 16 {
			i := r.IntN(pages)
			fill(want, uint64(i), versions[i])
			if !bytes.Equal(memory[i*page:][:page], want) {
				return fmt.Errorf("page %d is not version %d of itself", i, versions[i])
			}
			versions[i]++
			fill(memory[i*page:][:page], uint64(i), versions[i])
		}
		l.memory.Add(1)
		time.Sleep(10 * time.Millisecond)
	}
}

func fill(p []byte, number, version uint64) {
	x := number*0x9e3779b97f4a7c15 ^ version
	for i := 0; i < len(p); i += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(p[i:], x)
	}
}

// files writes, syncs and reads back files whose content follows from their name
// and version.
func (l *load) files(dir string) error {
	const count = 16
	versions := make([]uint64, count)
	r := rand.New(rand.NewPCG(3, 4))
	data := make([]byte, 64*page)
	for round := 0; ; round++ {
		i := r.IntN(count)
		path := filepath.Join(dir, fmt.Sprintf("file%02d", i))
		if versions[i] > 0 {
			if err := check(path, data, uint64(i), versions[i]); err != nil {
				return err
			}
		}
		versions[i]++
		if err := write(path, data, uint64(i), versions[i]); err != nil {
			return err
		}
		l.disk.Add(1)
		time.Sleep(20 * time.Millisecond)
	}
}

// content fills data as far as this version of a file goes.
func content(data []byte, number, version uint64) []byte {
	data = data[:(1+version%uint64(len(data)/page))*page]
	for i := 0; i < len(data); i += page {
		fill(data[i:][:page], number<<32|uint64(i), version)
	}
	return data
}

func write(path string, data []byte, number, version uint64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(content(data, number, version)); err != nil {
		return err
	}
	return f.Sync()
}

func check(path string, data []byte, number, version uint64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	// Throwing the clean pages away makes the read come from the disk.
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return err
	}
	got := make([]byte, len(data)+1)
	n, err := readAll(f, got)
	if err != nil {
		return err
	}
	if want := content(data, number, version); !bytes.Equal(got[:n], want) {
		return fmt.Errorf("%s: %d bytes are not version %d (%d bytes)", path, n, version, len(want))
	}
	return nil
}

func readAll(f *os.File, p []byte) (n int, err error) {
	for n < len(p) {
		m, err := f.Read(p[n:])
		n += m
		if m == 0 {
			break // end of file, or an error that the comparison will show
		}
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// tick sleeps on one CPU, so that the CPU's own timer has to wake it.
func (l *load) tick(cpu int) error {
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return err
	}
	for {
		pause := unix.NsecToTimespec(int64(20 * time.Millisecond))
		if err := unix.Nanosleep(&pause, nil); err != nil && err != unix.EINTR {
			return err
		}
		l.ticks[cpu].Add(1)
	}
}

// echo sends back whatever comes on a vsock port. Connections may break at any
// time: a restore resets them.
func (l *load) echo(port uint32) error {
	listener, err := listenVsock(port)
	if err != nil {
		return err
	}
	for {
		conn, err := acceptVsock(listener)
		if err != nil {
			return err
		}
		go l.serve(conn)
	}
}

func (l *load) serve(fd int) {
	defer unix.Close(fd)
	p := make([]byte, 32<<10)
	for {
		n, err := unix.Read(fd, p)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		for rest := p[:n]; len(rest) > 0; {
			n, err := unix.Write(fd, rest)
			if err != nil && err != unix.EINTR {
				return
			}
			rest = rest[max(n, 0):]
		}
		l.vsock.Add(1)
	}
}

func (l *load) report(path string) error {
	s := Status{CPU: l.cpu.Load(), Memory: l.memory.Load(), Disk: l.disk.Load(), Vsock: l.vsock.Load()}
	for i := range l.ticks {
		s.Ticks = append(s.Ticks, l.ticks[i].Load())
	}
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
