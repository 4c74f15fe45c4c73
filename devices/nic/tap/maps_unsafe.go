package tap

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapFile maps a part of a map of the kernel's.
func mapFile(f *os.File, offset, size, protection int) (data []byte, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) { data, err = unix.Mmap(int(fd), int64(offset), size, protection, unix.MAP_SHARED) }); e != nil {
		err = e
	}
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", f.Name(), err)
	}
	return data, nil
}

// counts are the programs' counters.
type counts struct {
	mu   sync.Mutex
	data []byte // nil once closed
	base [counted]uint64
}

// mapCounts maps the counters. What they have counted so far was before this network, and is none of it.
func mapCounts(f *os.File) (*counts, error) {
	data, err := mapFile(f, 0, os.Getpagesize(), unix.PROT_READ)
	c := &counts{data: data}
	for what := range counted {
		c.base[what] = c.read(what)
	}
	return c, err
}

func (c *counts) read(what Class) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.data == nil {
		return 0
	}
	// Aligned, as the mapping is, and within its first page; it is mapped as long as the lock is held.
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&c.data[8*what]))) - c.base[what]
}

func (c *counts) close() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.data != nil {
		_ = unix.Munmap(c.data) // it is one of ours
		c.data = nil
	}
}

// eventsSize is that of the ring in tap.c.
const eventsSize = 1 << 16

// Bits of a record's length (include/uapi/linux/bpf.h).
const (
	recordBusy    = 1 << 31 // being written
	recordDropped = 1 << 30
	recordHeader  = 8
)

// events is a ring buffer of the kernel's (Documentation/bpf/ringbuf.rst): a page with the position up to which we have read,
// one with the position up to which is written, and the data, twice in a row, so that no record is in two parts.
type events struct {
	mu      sync.Mutex
	read    []byte // nil once closed
	written []byte
}

func mapEvents(f *os.File) (*events, error) {
	page := os.Getpagesize()
	read, err := mapFile(f, 0, page, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, err
	}
	written, err := mapFile(f, page, page+2*eventsSize, unix.PROT_READ)
	if err != nil {
		_ = unix.Munmap(read) // it is one of ours
		return nil, err
	}
	return &events{read: read, written: written}, nil
}

// take calls each with every record that has been written, which is good until it returns.
func (e *events) take(each func([]byte)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.read == nil {
		return
	}
	// All of these are aligned within mappings that last as long as the lock is held: positions at the beginnings of pages, lengths of
	// records at multiples of 8 in the data.
	position := (*uint64)(unsafe.Pointer(&e.read[0]))
	end := (*uint64)(unsafe.Pointer(&e.written[0]))
	data := e.written[os.Getpagesize():]
	at := atomic.LoadUint64(position)
	for range eventsSize / recordHeader { // there are no more, whatever the position says
		if at >= atomic.LoadUint64(end) {
			return
		}
		offset := at % eventsSize &^ 7
		length := atomic.LoadUint32((*uint32)(unsafe.Pointer(&data[offset])))
		if length&recordBusy != 0 {
			return
		}
		size := uint64(length &^ recordDropped)
		if size > eventsSize-recordHeader {
			return
		}
		if length&recordDropped == 0 {
			each(data[offset+recordHeader : offset+recordHeader+size])
		}
		at += (recordHeader + size + 7) &^ 7
		atomic.StoreUint64(position, at)
	}
}

func (e *events) close() {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.read != nil {
		_, _ = unix.Munmap(e.read), unix.Munmap(e.written) // they are ours
		e.read, e.written = nil, nil
	}
}
