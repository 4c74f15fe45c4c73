package ext4

import (
	"fmt"
	"io"
	"os"
	"time"
)

// maxNodes bounds the tree, which is held in memory until Finish.
const maxNodes = 4 << 20

// Config says how large the image becomes.
type Config struct {
	// Size in bytes, a multiple of BlockSize from MinSize to MaxSize; 0 lets Finish choose one that leaves room.
	Size int64
}

// Writer builds one image. It is used by one goroutine.
type Writer struct {
	file   *os.File
	size   int64
	limit  uint64 // blocks that content may reach
	data   uint64 // first block behind the descriptor table, where content begins
	next   uint64 // first block not given out
	root   *Node
	nodes  []*Node // in the order of their making, which is the order of inode numbers
	freed  []extent
	buffer []byte
}

// NewWriter begins an image in an empty file. The file stays the caller's, who removes it if anything fails.
func NewWriter(file *os.File, c Config) (*Writer, error) {
	if c.Size != 0 && (c.Size < MinSize || c.Size > MaxSize || c.Size%BlockSize != 0) {
		return nil, fmt.Errorf("create ext4 image: size %d is not a multiple of %d from %d to %d", c.Size, BlockSize, int64(MinSize), int64(MaxSize))
	}
	limit := uint64(growLimit) / BlockSize
	if c.Size != 0 {
		limit = uint64(c.Size) / BlockSize
	}
	w := &Writer{file: file, size: c.Size, limit: limit, buffer: make([]byte, chunkSize)}
	w.data = 1 + descriptorBlocks(divideUp(limit, blocksPerGroup))
	w.next = w.data
	w.root = &Node{kind: Directory, children: map[string]*Node{}, links: 1, attributes: Attributes{Mode: 0o755, ModTime: time.Unix(0, 0)}}
	w.root.parent = w.root
	return w, nil
}

// Root is the root directory. It belongs to user 0 with mode 0755 until SetRoot says otherwise.
func (w *Writer) Root() *Node { return w.root }

// SetRoot gives the root directory its attributes.
func (w *Writer) SetRoot(a Attributes) error {
	if _, err := encodeXattrs(a.Xattrs); err != nil {
		return err
	}
	w.root.attributes = a
	return nil
}

// Mkdir adds a directory. One that is there gets the new attributes and keeps its entries.
func (w *Writer) Mkdir(parent *Node, name string, a Attributes) (*Node, error) {
	if old := parent.Lookup(name); old != nil && old.kind == Directory {
		if _, err := encodeXattrs(a.Xattrs); err != nil {
			return nil, err
		}
		old.attributes = a
		return old, nil
	}
	return w.add(parent, name, &Node{kind: Directory, attributes: a, children: map[string]*Node{}, parent: parent})
}

// Create adds a regular file of size bytes read from r. An error of r is returned wrapped.
func (w *Writer) Create(parent *Node, name string, a Attributes, size int64, r io.Reader) (*Node, error) {
	if size < 0 {
		return nil, &LimitError{What: fmt.Sprintf("file of %d bytes is not possible", size)}
	}
	node := &Node{kind: File, attributes: a, size: size}
	if err := w.check(parent, name, node); err != nil {
		return nil, err
	}
	if err := w.writeData(node, r); err != nil {
		return nil, err
	}
	return w.add(parent, name, node)
}

// Symlink adds a symbolic link. The target is not looked at; it has 1 to 4095 bytes.
func (w *Writer) Symlink(parent *Node, name, target string, a Attributes) (*Node, error) {
	if target == "" || len(target) >= BlockSize {
		return nil, &LimitError{What: fmt.Sprintf("symbolic link with a target of %d bytes is not possible", len(target))}
	}
	return w.add(parent, name, &Node{kind: Symlink, attributes: a, target: target, size: int64(len(target))})
}

// Mknod adds a device, fifo or socket. The device numbers count for devices only.
func (w *Writer) Mknod(parent *Node, name string, kind Kind, major, minor uint32, a Attributes) (*Node, error) {
	switch kind {
	case CharacterDevice, BlockDevice:
		if major > 0xfff || minor > 0xfffff {
			return nil, &LimitError{What: fmt.Sprintf("device number %d:%d is not possible", major, minor)}
		}
	case Fifo, Socket:
		major, minor = 0, 0
	default:
		return nil, &LimitError{What: fmt.Sprintf("kind %d is no special file", kind)}
	}
	return w.add(parent, name, &Node{kind: kind, attributes: a, major: major, minor: minor})
}

// Link adds another name for a node that is no directory.
func (w *Writer) Link(parent *Node, name string, node *Node) error {
	switch {
	case node.kind == Directory:
		return &ConflictError{Name: name, Reason: "would be a second name of a directory"}
	case node.links == 0:
		return &ConflictError{Name: name, Reason: "would be a name of a file that is gone"}
	case node.links >= 65000:
		return &LimitError{What: "more than 65000 names for one file"}
	case parent.Lookup(name) == node:
		return nil
	}
	if err := w.check(parent, name, node); err != nil {
		return err
	}
	w.enter(parent, name, node)
	return nil
}

// check says whether add would succeed.
func (w *Writer) check(parent *Node, name string, node *Node) error {
	if parent == nil || parent.kind != Directory {
		return &ConflictError{Name: name, Reason: "would lie in something that is no directory"}
	}
	if !validName(name) {
		return fmt.Errorf("name %q: %w", name, ErrName)
	}
	if len(w.nodes) >= maxNodes {
		return &LimitError{What: fmt.Sprintf("more than %d entries", maxNodes)}
	}
	if old := parent.Lookup(name); old != nil && old.kind == Directory && len(old.children) > 0 {
		return &ConflictError{Name: name, Reason: "is a directory that is not empty"}
	}
	_, err := encodeXattrs(node.attributes.Xattrs)
	return err
}

func (w *Writer) add(parent *Node, name string, node *Node) (*Node, error) {
	if err := w.check(parent, name, node); err != nil {
		return nil, err
	}
	w.nodes = append(w.nodes, node)
	w.enter(parent, name, node)
	return node, nil
}

// enter puts a name into a directory in place of what had it before.
func (w *Writer) enter(parent *Node, name string, node *Node) {
	if old := parent.Lookup(name); old != nil {
		old.links--
		if old.links == 0 {
			w.freed = append(w.freed, old.extents...)
			old.extents = nil
		}
	}
	node.links++
	parent.children[name] = node
}

// allocate gives out blocks in a row.
func (w *Writer) allocate(count uint64) (uint64, error) {
	if count > w.limit-w.next {
		return 0, &TooLargeError{Need: int64(w.next+count) * BlockSize, Size: int64(w.limit) * BlockSize}
	}
	start := w.next
	w.next += count
	return start, nil
}

func (w *Writer) writeBlocks(block uint64, p []byte) error {
	_, err := w.file.WriteAt(p, int64(block)*BlockSize)
	return err
}
