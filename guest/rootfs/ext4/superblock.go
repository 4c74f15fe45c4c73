package ext4

import "encoding/binary"

// Features, in the three classes that say what a kernel may do that does not know them.
const (
	featureHasJournal   = 0x4
	featureExtAttr      = 0x8
	featureDirIndex     = 0x20
	featureSparseSuper2 = 0x200

	featureFileType = 0x2
	featureExtents  = 0x40
	feature64Bit    = 0x80
	featureFlexBg   = 0x200

	featureSparseSuper  = 0x1
	featureLargeFile    = 0x2
	featureHugeFile     = 0x8
	featureDirNlink     = 0x20
	featureExtraIsize   = 0x40
	featureMetadataCsum = 0x400
)

// encodeSuperblock is the first block of the image: the superblock begins at byte 1024.
func (f *finisher) encodeSuperblock() []byte {
	block := make([]byte, BlockSize)
	p := block[1024:2048]
	le, l, id := binary.LittleEndian, &f.layout, &f.id
	free := f.freeBlocks()
	inodes := l.groups * l.inodesPerGroup
	seconds := uint32(id.Time.Unix())
	for _, field := range []struct {
		offset int
		value  uint64
	}{
		{0, inodes}, {4, l.blocks}, {12, free}, {16, inodes - uint64(f.inodes)},
		{24, 2}, {28, 2}, // block and cluster size, 1024 << n
		{32, blocksPerGroup}, {36, blocksPerGroup}, {40, l.inodesPerGroup},
		{48, uint64(seconds)}, {64, uint64(seconds)}, {264, uint64(seconds)}, // written, checked, made
		{76, 1}, {84, firstInode},
		{92, featureHasJournal | featureExtAttr | featureDirIndex | featureSparseSuper2},
		{96, featureFileType | featureExtents | feature64Bit | featureFlexBg},
		{100, featureSparseSuper | featureLargeFile | featureHugeFile | featureDirNlink | featureExtraIsize | featureMetadataCsum},
		{224, journalInode},
		{256, 0xc},                               // default mount options: user_xattr, acl
		{336, l.blocks >> 32}, {344, free >> 32}, // high halves
		{352, 1}, // directory hashes are signed
	} {
		le.PutUint32(p[field.offset:], uint32(field.value))
	}
	for _, field := range []struct {
		offset int
		value  uint16
	}{
		{54, 0xffff},                               // no check after a number of mounts
		{56, 0xef53}, {58, 1} /* clean */, {60, 1}, /* on errors: continue */
		{88, inodeSize}, {254, descriptorSize}, {348, extraSize}, {350, extraSize},
	} {
		le.PutUint16(p[field.offset:], field.value)
	}
	copy(p[104:120], id.UUID[:])
	copy(p[120:136], id.Label)
	copy(p[236:252], id.UUID[:]) // the seed of directory hashes need not be secret from the guest that makes the names
	p[252] = 1                   // directory hash: half MD4
	p[372] = 4                   // 16 groups to a flexible group
	p[373] = 1                   // checksums: CRC32C
	f.putJournalBackup(p)
	le.PutUint32(p[1020:], crc32c(^uint32(0), p[:1020]))
	return block
}

// putJournalBackup repeats the journal inode's place and size, for repairs.
func (f *finisher) putJournalBackup(p []byte) {
	n := f.journalNode()
	p[253] = 1
	putExtentTree(p[268:328], n.extents, nil)
	binary.LittleEndian.PutUint32(p[268+15*4:], uint32(n.size>>32))
	binary.LittleEndian.PutUint32(p[268+16*4:], uint32(n.size))
}

func (f *finisher) freeBlocks() uint64 {
	used := 1 + descriptorBlocks(f.layout.groups) + f.layout.end - f.data
	return f.layout.blocks - used + blocksIn(f.freed)
}
