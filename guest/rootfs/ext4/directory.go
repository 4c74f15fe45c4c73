package ext4

import (
	"encoding/binary"
	"maps"
	"slices"
)

const (
	directoryTail     = 12 // bytes at the end of each block: an entry that is none, with the checksum
	directoryTailType = 0xde
)

type directoryEntry struct {
	name   string
	number uint32
	kind   Kind
}

func (e directoryEntry) length() int { return (8 + len(e.name) + 3) &^ 3 }

// entries lists a directory as it is stored: itself, its parent, then the rest by name.
func (n *Node) entries() []directoryEntry {
	list := make([]directoryEntry, 0, len(n.children)+2)
	list = append(list, directoryEntry{".", n.number, Directory}, directoryEntry{"..", n.parent.number, Directory})
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		child := n.children[name]
		list = append(list, directoryEntry{name, child.number, child.kind})
	}
	return list
}

// directoryBlocks is how many blocks encodeDirectory will need; inode numbers do not matter for that.
func (n *Node) directoryBlocks() uint64 {
	count, used := uint64(1), 0
	for _, e := range n.entries() {
		if used+e.length() > BlockSize-directoryTail {
			count, used = count+1, 0
		}
		used += e.length()
	}
	return count
}

// encodeDirectory is the directory's blocks, each filled up by its last entry and closed by its checksum.
func (n *Node) encodeDirectory(seed uint32) []byte {
	p := make([]byte, n.size)
	const room = BlockSize - directoryTail
	block, used, last := p, 0, -1
	for _, e := range n.entries() {
		if used+e.length() > room {
			block, used, last = block[BlockSize:], 0, -1
		}
		if last >= 0 {
			binary.LittleEndian.PutUint16(block[last+4:], uint16(used-last))
		}
		putDirectoryEntry(block[used:room], e)
		last, used = used, used+e.length()
	}
	for block := range slices.Chunk(p, BlockSize) {
		if block[6] == 0 { // a block without entries, as in lost+found: one empty entry
			binary.LittleEndian.PutUint16(block[4:], room)
		}
		tail := block[room:]
		binary.LittleEndian.PutUint16(tail[4:], directoryTail)
		tail[7] = directoryTailType
		binary.LittleEndian.PutUint32(tail[8:], crc32c(seed, block[:room]))
	}
	return p
}

// putDirectoryEntry writes an entry that reaches to the end of p; the next entry makes it shorter.
func putDirectoryEntry(p []byte, e directoryEntry) {
	binary.LittleEndian.PutUint32(p[0:], e.number)
	binary.LittleEndian.PutUint16(p[4:], uint16(len(p)))
	p[6] = uint8(len(e.name))
	p[7] = uint8(e.kind)
	copy(p[8:], e.name)
}
