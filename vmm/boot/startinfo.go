package boot

import (
	"encoding/binary"

	"github.com/forkvm/forkvm/vmm/memory"
)

// Numbers of start_info.h.
const (
	startInfoMagic   = 0x336ec578
	startInfoVersion = 1 // the first that has a memory map
	startInfoSize    = 56
	moduleSize       = 32
	mapEntrySize     = 24
)

// writeStartInfo writes struct hvm_start_info and what it points to: the list
// of modules, of which the first is the initrd, and the memory map.
func writeStartInfo(mem *memory.Memory, initrd extent, rsdp uint64) error {
	ranges := MemoryMap(mem.Regions())
	info := make([]byte, startInfoSize)
	binary.LittleEndian.PutUint32(info[0:], startInfoMagic)
	binary.LittleEndian.PutUint32(info[4:], startInfoVersion)
	// Flags (8) stay zero: a guest, not the initial domain.
	if initrd.size > 0 {
		binary.LittleEndian.PutUint32(info[12:], 1)
		binary.LittleEndian.PutUint64(info[16:], modulesAddress)
	}
	binary.LittleEndian.PutUint64(info[24:], commandLine)
	binary.LittleEndian.PutUint64(info[32:], rsdp)
	binary.LittleEndian.PutUint64(info[40:], memoryMapAddress)
	binary.LittleEndian.PutUint32(info[48:], uint32(len(ranges)))

	module := make([]byte, moduleSize) // without a command line of its own
	binary.LittleEndian.PutUint64(module[0:], initrd.start)
	binary.LittleEndian.PutUint64(module[8:], initrd.size)

	table := make([]byte, 0, len(ranges)*mapEntrySize)
	for _, r := range ranges {
		table = binary.LittleEndian.AppendUint64(table, r.Start)
		table = binary.LittleEndian.AppendUint64(table, r.Size)
		table = binary.LittleEndian.AppendUint32(table, uint32(r.Type))
		table = binary.LittleEndian.AppendUint32(table, 0)
	}
	for address, part := range map[uint64][]byte{
		startInfoAddress: info, modulesAddress: module, memoryMapAddress: table,
	} {
		if err := mem.WriteAt(part, address); err != nil {
			return err
		}
	}
	return nil
}
