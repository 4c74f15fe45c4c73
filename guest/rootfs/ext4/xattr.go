package ext4

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	xattrMagic       = 0xea020000
	xattrHeader      = 32 // bytes before the first entry of a block
	xattrRoomInode   = inodeSize - xattrArea - 4
	xattrRoomBlock   = BlockSize - xattrHeader
	xattrTerminator  = 4
	xattrEntryFields = 16
)

// xattrPrefixes are the name spaces that are stored as a number. The first that fits counts.
var xattrPrefixes = []struct {
	prefix string
	index  uint8
	whole  bool // the prefix is the whole name
}{
	{"system.posix_acl_access", 2, true},
	{"system.posix_acl_default", 3, true},
	{"user.", 1, false},
	{"trusted.", 4, false},
	{"security.", 6, false},
	{"system.", 7, false},
}

type xattr struct {
	index uint8
	name  string // without the prefix
	value []byte
}

func (x xattr) nameLength() int  { return (len(x.name) + 3) &^ 3 }
func (x xattr) valueLength() int { return (len(x.value) + 3) &^ 3 }

func xattrLength(list []xattr) int {
	total := xattrTerminator
	for _, x := range list {
		total += xattrEntryFields + x.nameLength() + x.valueLength()
	}
	return total
}

// encodeXattrs brings extended attributes into the form and order in which they are stored, and checks that they fit.
func encodeXattrs(attributes map[string][]byte) ([]xattr, error) {
	list := make([]xattr, 0, len(attributes))
	for _, name := range slices.Sorted(maps.Keys(attributes)) {
		x, err := encodeXattr(name, attributes[name])
		if err != nil {
			return nil, err
		}
		list = append(list, x)
	}
	if xattrLength(list) > xattrRoomBlock {
		return nil, &LimitError{What: "extended attributes of one entry do not fit into a block"}
	}
	slices.SortFunc(list, func(a, b xattr) int { // the order that the kernel searches in
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(len(a.name), len(b.name)), cmp.Compare(a.name, b.name))
	})
	return list, nil
}

func encodeXattr(name string, value []byte) (xattr, error) {
	for _, p := range xattrPrefixes {
		rest, found := strings.CutPrefix(name, p.prefix)
		if !found || p.whole != (rest == "") {
			continue
		}
		if len(rest) > 255 || strings.ContainsRune(rest, 0) {
			break
		}
		if !p.whole {
			return xattr{p.index, rest, value}, nil
		}
		acl, err := encodeACL(value)
		if err != nil {
			return xattr{}, fmt.Errorf("extended attribute %q: %w", name, err)
		}
		return xattr{p.index, rest, acl}, nil
	}
	return xattr{}, &LimitError{What: fmt.Sprintf("extended attribute name %q is not possible", name)}
}

// encodeACL turns an access control list from the form of the system calls (version 2, 8 bytes an entry) into that of the disk
// (version 1, no id for entries that name nobody).
func encodeACL(value []byte) ([]byte, error) {
	const user, group = 0x02, 0x08
	le := binary.LittleEndian
	if len(value) < 4 || le.Uint32(value) != 2 || len(value)%8 != 4 {
		return nil, &LimitError{What: "not an access control list"}
	}
	out := le.AppendUint32(nil, 1)
	for entry := range slices.Chunk(value[4:], 8) {
		out = append(out, entry[:4]...)
		if tag := le.Uint16(entry); tag == user || tag == group {
			out = append(out, entry[4:]...)
		}
	}
	return out, nil
}

// putXattrs writes entries from the front of area and values from its end. Value offsets count from base bytes before area.
func putXattrs(area []byte, list []xattr, base int, hashes bool) {
	le := binary.LittleEndian
	at, end := 0, len(area)
	for _, x := range list {
		end -= x.valueLength()
		copy(area[end:], x.value)
		e := area[at:]
		e[0] = uint8(len(x.name))
		e[1] = x.index
		if len(x.value) > 0 {
			le.PutUint16(e[2:], uint16(base+end))
		}
		le.PutUint32(e[8:], uint32(len(x.value)))
		if hashes {
			le.PutUint32(e[12:], x.hash())
		}
		copy(e[xattrEntryFields:], x.name)
		at += xattrEntryFields + x.nameLength()
	}
}

func putXattrsInInode(area []byte, list []xattr) {
	binary.LittleEndian.PutUint32(area, xattrMagic)
	putXattrs(area[4:], list, 0, false)
}

// encodeXattrBlock is the block for extended attributes that the inode has no room for.
func encodeXattrBlock(list []xattr, seed uint32, block uint64) []byte {
	p := make([]byte, BlockSize)
	le := binary.LittleEndian
	le.PutUint32(p[0:], xattrMagic)
	le.PutUint32(p[4:], 1) // references
	le.PutUint32(p[8:], 1) // blocks
	putXattrs(p[xattrHeader:], list, xattrHeader, true)
	hash := uint32(0)
	for _, x := range list {
		hash = hash<<16 ^ hash>>16 ^ x.hash()
	}
	le.PutUint32(p[12:], hash)
	var number [8]byte
	le.PutUint64(number[:], block)
	le.PutUint32(p[16:], crc32c(crc32c(seed, number[:]), p))
	return p
}

// hash is e_hash, which lets the kernel find equal entries.
func (x xattr) hash() uint32 {
	hash := uint32(0)
	for _, c := range []byte(x.name) {
		hash = hash<<5 ^ hash>>27 ^ uint32(c)
	}
	value := make([]byte, x.valueLength())
	copy(value, x.value)
	for word := range slices.Chunk(value, 4) {
		hash = hash<<16 ^ hash>>16 ^ binary.LittleEndian.Uint32(word)
	}
	return hash
}
