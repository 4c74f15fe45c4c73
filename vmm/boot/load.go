package boot

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/forkvm/forkvm/vmm/boot/acpi"
	"github.com/forkvm/forkvm/vmm/memory"
)

// MaxCommandLine is the longest command line in bytes: Linux on x86 has room for
// 2048 (COMMAND_LINE_SIZE) with the zero at the end.
const MaxCommandLine = 2047

// Config is what to boot.
type Config struct {
	Kernel      io.ReaderAt // ELF vmlinux with PVH entry
	Initrd      io.ReaderAt // may be nil
	InitrdSize  int64       // bytes
	CommandLine string
	ACPI        acpi.Config
}

// Load puts the kernel, the initrd, the command line, the ACPI tables and the
// PVH start information into a memory that nothing has run in yet, and returns
// how the first vCPU has to be set up. Errors wrap ErrNotKernel, ErrNoPVHEntry,
// ErrTruncated, ErrTooBig or ErrMalformed, are an *acpi.ConfigError, or come from
// reading the files. After an error the memory's contents are undefined.
func Load(mem *memory.Memory, c Config) (Entry, error) {
	x, err := readExecutable(c.Kernel)
	if err != nil {
		return Entry{}, fmt.Errorf("load kernel: %w", err)
	}
	end, err := loadKernel(mem, c.Kernel, x)
	if err != nil {
		return Entry{}, fmt.Errorf("load kernel: %w", err)
	}
	initrd, err := loadInitrd(mem, c, end)
	if err != nil {
		return Entry{}, fmt.Errorf("load initrd: %w", err)
	}
	if err := loadCommandLine(mem, c.CommandLine); err != nil {
		return Entry{}, fmt.Errorf("load command line: %w", err)
	}
	tables, err := acpi.Build(c.ACPI)
	if err != nil {
		return Entry{}, err
	}
	if err := mem.WriteAt(tables.Image, tables.Address); err != nil {
		return Entry{}, fmt.Errorf("load ACPI tables: %w", err)
	}
	if err := writeStartInfo(mem, initrd, tables.RSDP); err != nil {
		return Entry{}, fmt.Errorf("load start information: %w", err)
	}
	return Entry{Address: uint64(x.entry), StartInfo: startInfoAddress}, nil
}

// lowRAM is the end of the RAM that a kernel can be loaded into.
func lowRAM(mem *memory.Memory) uint64 { return mem.Regions()[0].Size }

// loadKernel copies the segments to their physical addresses and returns the
// address behind the last of them. All are checked before the first is copied.
func loadKernel(mem *memory.Memory, r io.ReaderAt, x executable) (end uint64, err error) {
	for i, s := range x.segments {
		if s.start < kernelMin {
			return 0, fmt.Errorf("segment %d at %#x, below 1 MiB: %w", i, s.start, ErrMalformed)
		}
		if s.start+s.size > lowRAM(mem) {
			return 0, fmt.Errorf("segment %d at %#x, %d bytes: %w", i, s.start, s.size, ErrTooBig)
		}
		end = max(end, s.start+s.size)
	}
	for i, s := range x.segments {
		if err := copyIn(mem, s.start, r, s.offset, s.fileSize); err != nil {
			return 0, fmt.Errorf("segment %d: %w", i, err)
		}
		if err := wipe(mem, s.start+s.fileSize, s.size-s.fileSize); err != nil {
			return 0, fmt.Errorf("segment %d: %w", i, err)
		}
	}
	return end, nil
}

// extent is a stretch of guest-physical memory.
type extent struct{ start, size uint64 }

// loadInitrd puts the initrd as high as possible, out of the way of what the
// kernel does with the memory above itself early on.
func loadInitrd(mem *memory.Memory, c Config, kernelEnd uint64) (extent, error) {
	if c.Initrd == nil || c.InitrdSize == 0 {
		return extent{}, nil
	}
	top := min(lowRAM(mem), initrdHighEnd)
	if c.InitrdSize < 0 || uint64(c.InitrdSize) > top {
		return extent{}, fmt.Errorf("%d bytes: %w", c.InitrdSize, ErrTooBig)
	}
	size := uint64(c.InitrdSize)
	start := (top - size) &^ (memory.PageSize - 1)
	if start < kernelEnd {
		return extent{}, fmt.Errorf("%d bytes beside a kernel that ends at %#x: %w", size, kernelEnd, ErrTooBig)
	}
	return extent{start, size}, copyIn(mem, start, c.Initrd, 0, size)
}

func loadCommandLine(mem *memory.Memory, line string) error {
	if len(line) > MaxCommandLine {
		return fmt.Errorf("%d bytes, %d are possible: %w", len(line), MaxCommandLine, ErrTooBig)
	}
	if strings.ContainsRune(line, 0) {
		return fmt.Errorf("zero byte at position %d", strings.IndexByte(line, 0))
	}
	return mem.WriteAt(append([]byte(line), 0), commandLine)
}

// chunk is how much is read at a time.
const chunk = 1 << 20

// copyIn copies size bytes of a file, from offset on, to guest-physical address
// gpa. Pages of zeros, of which a kernel has many, are not written where there
// are zeros already, so that they take no memory.
func copyIn(mem *memory.Memory, gpa uint64, r io.ReaderAt, offset, size uint64) error {
	buf := make([]byte, min(chunk, size))
	for size > 0 {
		n := min(size, chunk)
		if err := readFull(r, buf[:n], offset); err != nil {
			return err
		}
		if err := write(mem, gpa, buf[:n]); err != nil {
			return err
		}
		gpa, offset, size = gpa+n, offset+n, size-n
	}
	return nil
}

// write writes p page by page.
func write(mem *memory.Memory, gpa uint64, p []byte) error {
	for len(p) > 0 {
		n := min(memory.PageSize-gpa%memory.PageSize, uint64(len(p)))
		var err error
		if bytes.Equal(p[:n], zeros[:n]) {
			err = wipe(mem, gpa, n)
		} else {
			err = mem.WriteAt(p[:n], gpa)
		}
		if err != nil {
			return err
		}
		gpa, p = gpa+n, p[n:]
	}
	return nil
}

var zeros [memory.PageSize]byte

// wipe makes size bytes zero and writes only pages that are not.
func wipe(mem *memory.Memory, gpa, size uint64) error {
	var page [memory.PageSize]byte
	for size > 0 {
		n := min(memory.PageSize-gpa%memory.PageSize, size)
		if err := mem.ReadAt(page[:n], gpa); err != nil {
			return err
		}
		if !bytes.Equal(page[:n], zeros[:n]) {
			if err := mem.WriteAt(zeros[:n], gpa); err != nil {
				return err
			}
		}
		gpa, size = gpa+n, size-n
	}
	return nil
}
