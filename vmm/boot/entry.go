package boot

import (
	"encoding/binary"
	"fmt"

	"github.com/forkvm/forkvm/vmm/memory"
)

// Entry is the state in which the first vCPU has to start: 32-bit protected mode
// without paging, interrupts off. What it does not name is as after a reset.
type Entry struct {
	RIP    uint64 // physical address of the PVH entry
	RBX    uint64 // physical address of the start information
	RFLAGS uint64
	CR0    uint64
	CR4    uint64
	EFER   uint64
	Code   Segment // CS
	Data   Segment // DS, ES, FS, GS, SS
	Task   Segment // TR
	GDT    Table
	IDT    Table
}

// Segment is a segment register with its hidden part. The fields are as in the
// descriptors of Intel's manual, volume 3, section 3.4.5.
type Segment struct {
	Selector    uint16
	Base        uint64
	Limit       uint32 // in bytes
	Type        uint8  // 4 bits
	System      bool   // the S flag is clear
	Present     bool
	Default32   bool // D/B
	Granularity bool // G: the limit counts pages
}

// Table is a descriptor-table register.
type Table struct {
	Base  uint64
	Limit uint16
}

// Bits of the manual, volume 3: section 2.5 for CR0, section 3.4.5.1 and 3.5 for
// the segment types.
const (
	cr0ProtectedMode = 1 << 0
	cr0ExtensionType = 1 << 4 // always set on current processors
	rflagsFixed      = 1 << 1

	typeCode = 0xb // execute, read, accessed
	typeData = 0x3 // read, write, accessed
	typeTask = 0xb // busy 32-bit task
)

const taskLimit = 0x67 // a 32-bit task state segment without I/O bitmap

// enter writes the descriptor table and returns the first vCPU's state.
func enter(mem *memory.Memory, entry uint32) (Entry, error) {
	flat := Segment{Limit: 0xffffffff, Present: true, Default32: true, Granularity: true}
	code, data := flat, flat
	code.Selector, code.Type = 1<<3, typeCode
	data.Selector, data.Type = 2<<3, typeData
	task := Segment{Selector: 3 << 3, Limit: taskLimit, Type: typeTask, System: true, Present: true}

	descriptors := []uint64{0, code.descriptor(), data.descriptor(), task.descriptor()}
	table := make([]byte, 0, 8*len(descriptors))
	for _, d := range descriptors {
		table = binary.LittleEndian.AppendUint64(table, d)
	}
	if err := mem.WriteAt(table, gdtAddress); err != nil {
		return Entry{}, fmt.Errorf("load descriptor table: %w", err)
	}
	return Entry{
		RIP:    uint64(entry),
		RBX:    startInfoAddress,
		RFLAGS: rflagsFixed,
		CR0:    cr0ProtectedMode | cr0ExtensionType,
		Code:   code,
		Data:   data,
		Task:   task,
		GDT:    Table{Base: gdtAddress, Limit: uint16(len(table) - 1)},
	}, nil
}

// descriptor is the segment as an entry of the descriptor table.
func (s Segment) descriptor() uint64 {
	limit := uint64(s.Limit)
	if s.Granularity {
		limit >>= 12
	}
	d := limit&0xffff | limit>>16&0xf<<48 |
		s.Base&0xffffff<<16 | s.Base>>24&0xff<<56 |
		uint64(s.Type)<<40
	for bit, set := range map[int]bool{44: !s.System, 47: s.Present, 54: s.Default32, 55: s.Granularity} {
		if set {
			d |= 1 << bit
		}
	}
	return d
}
