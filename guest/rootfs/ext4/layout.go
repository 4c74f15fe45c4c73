package ext4

// The geometry. One block group is what one block of bitmap describes.
const (
	BlockSize      = 4096
	blocksPerGroup = 8 * BlockSize
	inodeSize      = 256
	inodesPerBlock = BlockSize / inodeSize
	descriptorSize = 64
	bytesPerInode  = 16384 // as mke2fs does by default

	// MinSize and MaxSize bound the size of an image in bytes. The upper bound keeps the reserved descriptor table small.
	MinSize = 8 << 20
	MaxSize = 4 << 40
	// growLimit bounds an image whose size is computed.
	growLimit = 256 << 30

	rootInode      = 2
	journalInode   = 8
	firstInode     = 11 // the first that is free for use; lost+found gets it
	reservedInodes = firstInode - 1
)

// layout is the image's division into groups, known when all content is.
type layout struct {
	blocks         uint64
	groups         uint64
	inodesPerGroup uint64
	journal        uint64 // first block of the journal
	journalBlocks  uint64
	blockBitmaps   uint64 // first of one block for each group
	inodeBitmaps   uint64 // first of one block for each group
	inodeTables    uint64 // first of tableBlocks for each group
	end            uint64 // first block behind all that is used
}

func (l *layout) tableBlocks() uint64 { return l.inodesPerGroup / inodesPerBlock }

func divideUp(a, b uint64) uint64 { return (a + b - 1) / b }

func roundUp(a, b uint64) uint64 { return divideUp(a, b) * b }

// descriptorBlocks is the length of the group descriptor table.
func descriptorBlocks(groups uint64) uint64 { return divideUp(groups*descriptorSize, BlockSize) }

// journalSize follows mke2fs, with a lower top: nobody runs thousands of parallel fsyncs on an image of this kind.
func journalSize(blocks uint64) uint64 {
	switch {
	case blocks < 32768: // 128 MiB
		return 1024
	case blocks < 256<<10: // 1 GiB
		return 4096
	case blocks < 512<<10: // 2 GiB
		return 8192
	default:
		return 16384
	}
}

// plan fixes the layout for an image of the given number of blocks whose content ends before block next.
func plan(blocks, next, inodes uint64) (layout, error) {
	l := layout{blocks: blocks, groups: divideUp(blocks, blocksPerGroup), journalBlocks: journalSize(blocks)}
	wanted := max(blocks*BlockSize/bytesPerInode, inodes+inodes/4+64)
	l.inodesPerGroup = min(roundUp(divideUp(wanted, l.groups), inodesPerBlock), blocksPerGroup)
	l.journal = next
	l.blockBitmaps = l.journal + l.journalBlocks
	l.inodeBitmaps = l.blockBitmaps + l.groups
	l.inodeTables = l.inodeBitmaps + l.groups
	l.end = l.inodeTables + l.groups*l.tableBlocks()
	if l.end > blocks || inodes > l.groups*l.inodesPerGroup {
		return l, &TooLargeError{Need: int64(max(l.end, inodes*bytesPerInode/BlockSize)) * BlockSize, Size: int64(blocks) * BlockSize}
	}
	return l, nil
}

// choose is plan for an image whose size is ours to choose: a quarter of the content is left free, and never less than 256 MiB.
func choose(next, inodes, limit uint64) (layout, error) {
	blocks := next + max(next/4, 256<<20/BlockSize)
	for {
		blocks = roundUp(blocks, 256)
		if blocks > limit {
			return layout{}, &TooLargeError{Need: int64(blocks) * BlockSize, Size: int64(limit) * BlockSize}
		}
		l, err := plan(blocks, next, inodes)
		free := blocks - min(l.end, blocks)
		if err == nil && free >= max(next/4, 256<<20/BlockSize) {
			return l, nil
		}
		blocks += blocks / 16
	}
}
