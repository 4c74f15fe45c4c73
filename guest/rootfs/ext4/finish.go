package ext4

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"
)

// Identity is what tells one file system from another of the same content.
type Identity struct {
	UUID  [16]byte
	Label string // at most 16 bytes
	Time  time.Time
}

// Finish writes all that is not file content and gives the file its size, which it returns. The Writer is of no use afterwards. The
// caller makes the file durable.
func (w *Writer) Finish(id Identity) (int64, error) {
	if len(id.Label) > 16 {
		return 0, fmt.Errorf("finish ext4 image: label %q is longer than 16 bytes", id.Label)
	}
	f := finisher{Writer: w, id: id, seed: fileSystemSeed(id.UUID)}
	if err := f.run(); err != nil {
		return 0, fmt.Errorf("finish ext4 image: %w", err)
	}
	return int64(f.layout.blocks) * BlockSize, nil
}

// finisher is a Writer on its last way: numbers are given out, then places, then everything is written.
type finisher struct {
	*Writer
	id     Identity
	seed   uint32
	layout layout
	inodes uint32   // highest inode number in use
	order  []*Node  // by inode number, from the root
	dirs   []uint64 // directories in each group
}

func (f *finisher) run() error {
	f.ensureLostAndFound()
	f.number()
	if err := f.place(); err != nil {
		return err
	}
	if err := f.file.Truncate(int64(f.layout.blocks) * BlockSize); err != nil {
		return err
	}
	for _, write := range []func() error{f.writeNodes, f.writeJournal, f.writeInodeTables, f.writeGroups} {
		if err := write(); err != nil {
			return err
		}
	}
	return f.writeBlocks(0, f.encodeSuperblock())
}

// ensureLostAndFound adds the directory that e2fsck wants to find. It is as large as mke2fs makes it, so that e2fsck can use it without
// allocating.
func (f *finisher) ensureLostAndFound() {
	if f.root.Lookup("lost+found") != nil {
		return
	}
	node := &Node{kind: Directory, children: map[string]*Node{}, parent: f.root, size: 4 * BlockSize}
	node.attributes = Attributes{Mode: 0o700, ModTime: f.id.Time}
	f.nodes = slices.Insert(f.nodes, 0, node)
	f.enter(f.root, "lost+found", node)
}

// number gives inode numbers to what can still be reached by a name.
func (f *finisher) number() {
	f.root.number = rootInode
	f.order = append(f.order, f.root)
	f.inodes = reservedInodes
	for _, n := range f.nodes {
		if n.links == 0 {
			continue
		}
		f.inodes++
		n.number = f.inodes
		f.order = append(f.order, n)
	}
}

// place gives blocks to everything that is not file content.
func (f *finisher) place() error {
	for _, n := range f.order {
		if err := f.placeNode(n); err != nil {
			return err
		}
	}
	var err error
	if f.size == 0 {
		f.layout, err = choose(f.next, uint64(f.inodes), f.limit)
	} else {
		f.layout, err = plan(f.limit, f.next, uint64(f.inodes))
	}
	f.dirs = make([]uint64, f.layout.groups)
	return err
}

func (f *finisher) placeNode(n *Node) (err error) {
	if n.kind == Directory {
		n.size = max(n.size, int64(n.directoryBlocks())*BlockSize)
	}
	if n.kind == Directory || n.kind == Symlink && n.size >= fastSymlinkSize {
		count := divideUp(uint64(n.size), BlockSize)
		start, err := f.allocate(count)
		if err != nil {
			return err
		}
		n.extents = extentsOf(start, count)
	}
	for range leafBlocks(len(n.extents)) {
		block, err := f.allocate(1)
		if err != nil {
			return err
		}
		n.leaves = append(n.leaves, block)
	}
	if n.xattrs, err = encodeXattrs(n.attributes.Xattrs); err != nil {
		return err
	}
	if xattrLength(n.xattrs) > xattrRoomInode {
		n.xattrsAt, err = f.allocate(1)
	}
	return err
}

// writeNodes writes the blocks that belong to single inodes: directories, long links, extents, extended attributes.
func (f *finisher) writeNodes() error {
	for _, n := range f.order {
		seed := inodeSeed(f.seed, n.number)
		var content []byte
		switch {
		case n.kind == Directory:
			content = n.encodeDirectory(seed)
		case n.kind == Symlink && len(n.extents) > 0:
			content = make([]byte, BlockSize)
			copy(content, n.target)
		}
		if content != nil {
			if err := f.writeBlocks(n.extents[0].start, content); err != nil {
				return err
			}
		}
		for i, block := range n.leaves {
			part := n.extents[i*extentsInBlock : min((i+1)*extentsInBlock, len(n.extents))]
			if err := f.writeBlocks(block, encodeLeaf(part, seed)); err != nil {
				return err
			}
		}
		if n.xattrsAt != 0 {
			if err := f.writeBlocks(n.xattrsAt, encodeXattrBlock(n.xattrs, f.seed, n.xattrsAt)); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeJournal writes the journal's superblock; an empty journal is zeros behind it. Its fields are big-endian.
func (f *finisher) writeJournal() error {
	p := make([]byte, 1024)
	be := binary.BigEndian
	be.PutUint32(p[0:], 0xc03b3998) // JBD2 magic
	be.PutUint32(p[4:], 4)          // superblock, version 2
	be.PutUint32(p[12:], BlockSize)
	be.PutUint32(p[16:], uint32(f.layout.journalBlocks))
	be.PutUint32(p[20:], 1) // first block of the log
	be.PutUint32(p[24:], 1) // first sequence number
	copy(p[48:], f.id.UUID[:])
	be.PutUint32(p[64:], 1) // users
	return f.writeBlocks(f.layout.journal, p)
}

// journalNode is the journal as a file.
func (f *finisher) journalNode() *Node {
	return &Node{
		kind:       File,
		number:     journalInode,
		links:      1,
		size:       int64(f.layout.journalBlocks) * BlockSize,
		extents:    extentsOf(f.layout.journal, f.layout.journalBlocks),
		attributes: Attributes{Mode: 0o600, ModTime: f.id.Time},
	}
}

// writeInodeTables writes the used front of each group's table. The rest stays a hole, which reads as zero.
func (f *finisher) writeInodeTables() error {
	perGroup := uint32(f.layout.inodesPerGroup)
	table := make([]byte, f.layout.inodesPerGroup*inodeSize)
	nodes := append([]*Node{f.root, f.journalNode()}, f.order[1:]...)
	for group := uint32(0); group*perGroup < f.inodes; group++ {
		clear(table)
		first, end := group*perGroup+1, min((group+1)*perGroup, f.inodes)+1
		for len(nodes) > 0 && nodes[0].number < end {
			n := nodes[0]
			copy(table[(n.number-first)*inodeSize:], n.encodeInode(f.seed))
			if n.kind == Directory {
				f.dirs[group]++
			}
			nodes = nodes[1:]
		}
		used := roundUp(uint64(end-first), inodesPerBlock) * inodeSize
		if err := f.writeBlocks(f.layout.inodeTables+uint64(group)*f.layout.tableBlocks(), table[:used]); err != nil {
			return err
		}
	}
	return nil
}
