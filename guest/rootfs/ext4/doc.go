// Package ext4 writes a new ext4 file system image from a tree that is given entry by entry.
//
// It needs no privilege, no loop device and no e2fsprogs: owners, device nodes and extended attributes are bytes in the image, never
// calls to the host. File data goes to its final place while it is read; everything else (directories, inodes, bitmaps) is written by
// Finish. The result depends only on what was added and on the options, so equal input gives an equal image.
//
// The layout is one that Linux and e2fsck take as ordinary ext4 (extents, 64bit, flex_bg, metadata_csum, a journal): data from the
// front, all bitmaps and inode tables after it, no copies of the superblock (sparse_super2 with none). What is free stays a hole in
// the image file, the unused part of the inode tables included; they read as zero and are marked so, and the guest's kernel has
// nothing to initialize in the background.
//
// Numbers and field offsets are those of the kernel's Documentation/filesystems/ext4.
package ext4
