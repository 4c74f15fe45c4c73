package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// random writes single pages all over a file, past the page cache, with so many
// requests at a time, and reads each page before it writes it again: what it
// holds follows from its place and from how often it was written. It ends when
// the stop file appears, after it has read everything, or at the first wrong
// byte. The number of requests goes to the status file.
func random(args []string) error {
	flags := flag.NewFlagSet("random", flag.ContinueOnError)
	path := flags.String("file", "/var/tmp/random", "file under test")
	megabytes := flags.Int("size", 8, "its size in MiB")
	depth := flags.Int("depth", 16, "requests at a time")
	status := flags.String("status", "/run/random", "status file")
	stop := flags.String("stop", "/run/random.stop", "stop file")
	if err := flags.Parse(args); err != nil {
		return err
	}
	pages := *megabytes << 20 / page
	if err := os.WriteFile(*path, make([]byte, *megabytes<<20), 0o644); err != nil {
		return err
	}
	f, err := os.OpenFile(*path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	w := &writers{file: f}
	var all sync.WaitGroup
	errs := make([]error, *depth)
	for i := range *depth {
		all.Go(func() { errs[i] = w.write(i, *depth, pages) })
	}
	for !w.stopped.Load() {
		if _, err := os.Stat(*stop); err == nil || !errors.Is(err, fs.ErrNotExist) {
			w.stopped.Store(true)
		}
		if err := os.WriteFile(*status+".new", fmt.Appendln(nil, w.requests.Load()), 0o644); err != nil {
			return err
		}
		if err := os.Rename(*status+".new", *status); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	all.Wait()
	return errors.Join(errs...)
}

type writers struct {
	file     *os.File
	requests atomic.Uint64
	stopped  atomic.Bool
}

// write has each page whose number is first plus a multiple of step to itself.
func (w *writers) write(first, step, pages int) error {
	// Requests past the page cache need buffers at page boundaries.
	buffer, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer unix.Munmap(buffer)
	versions := make([]uint64, (pages-first+step-1)/step)
	r := rand.New(rand.NewPCG(uint64(first), 6))
	for !w.stopped.Load() {
		i := r.IntN(len(versions))
		if err := w.check(buffer, first+i*step, versions[i]); err != nil {
			return err
		}
		versions[i]++
		fill(buffer, uint64(first+i*step), versions[i])
		if _, err := w.file.WriteAt(buffer, int64(first+i*step)*page); err != nil {
			return w.fail(err)
		}
		w.requests.Add(2)
	}
	for i, version := range versions {
		if err := w.check(buffer, first+i*step, version); err != nil {
			return err
		}
	}
	return nil
}

// fail stops the others too.
func (w *writers) fail(err error) error {
	w.stopped.Store(true)
	return err
}

func (w *writers) check(buffer []byte, number int, version uint64) error {
	if _, err := w.file.ReadAt(buffer, int64(number)*page); err != nil {
		return w.fail(err)
	}
	want := make([]byte, page)
	if version > 0 {
		fill(want, uint64(number), version)
	}
	if !bytes.Equal(buffer, want) {
		return w.fail(fmt.Errorf("page %d of the file is not version %d of itself", number, version))
	}
	return nil
}

// hog takes so much memory, and keeps it until it is killed.
func hog(args []string) error {
	flags := flag.NewFlagSet("hog", flag.ContinueOnError)
	megabytes := flags.Int("size", 64, "MiB")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var kept [][]byte
	// In pieces, since nobody is given more at once than there is.
	for range *megabytes {
		piece := make([]byte, 1<<20)
		for at := 0; at < len(piece); at += page {
			piece[at] = 1
		}
		kept = append(kept, piece)
	}
	time.Sleep(time.Hour)
	_, err := fmt.Println(len(kept))
	return err
}
