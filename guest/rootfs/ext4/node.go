package ext4

import (
	"strings"
	"time"
)

// Kind is what an inode is.
type Kind uint8

// The kinds, with the values they have in a directory entry.
const (
	File Kind = 1 + iota
	Directory
	CharacterDevice
	BlockDevice
	Fifo
	Socket
	Symlink
)

// typeBits are the kinds' file type bits in i_mode.
var typeBits = [...]uint16{File: 0x8000, Directory: 0x4000, CharacterDevice: 0x2000, BlockDevice: 0x6000, Fifo: 0x1000, Socket: 0xc000, Symlink: 0xa000}

// Attributes are what an entry has besides its content.
type Attributes struct {
	Mode     uint16 // permissions with set-user-id, set-group-id and sticky bit: the low 12 bits
	UID, GID uint32
	ModTime  time.Time         // 1901 to 2446; what lies outside is moved to the border
	Xattrs   map[string][]byte // by full name ("security.capability"), values as the system calls give them
}

// Node is a file, directory or other entry of the tree; several names can lead to one Node.
type Node struct {
	kind       Kind
	attributes Attributes
	children   map[string]*Node // of a directory
	parent     *Node            // of a directory; the root is its own
	links      int              // names that lead here
	target     string           // of a symbolic link
	major      uint32           // of a device
	minor      uint32
	size       int64
	extents    []extent

	// Given out by Finish.
	number   uint32
	leaves   []uint64 // blocks that hold the extents which the inode has no room for
	xattrs   []xattr
	xattrsAt uint64 // block of the extended attributes, if the inode has no room for them
}

// Kind says what the node is.
func (n *Node) Kind() Kind { return n.kind }

// Attributes returns what was given when the node was added last.
func (n *Node) Attributes() Attributes { return n.attributes }

// Target is where a symbolic link points.
func (n *Node) Target() string { return n.target }

// Parent is the directory that a directory lies in; the root's is the root itself.
func (n *Node) Parent() *Node { return n.parent }

// Lookup finds a name in a directory; nil if there is none, or if n is no directory.
func (n *Node) Lookup(name string) *Node { return n.children[name] }

func validName(name string) bool {
	return name != "" && name != "." && name != ".." && len(name) <= 255 && !strings.ContainsAny(name, "/\x00")
}

// subdirectories counts the directories in a directory: each has a ".." that is a link to n.
func (n *Node) subdirectories() int {
	count := 0
	for _, child := range n.children {
		if child.kind == Directory {
			count++
		}
	}
	return count
}
