// Package layer stores immutable sets of memory pages and disk blocks, and
// stacks them.
//
// A layer file holds the pages (or blocks) of one step, 4096 bytes each, so
// that they can be mapped or read in place, with an index that says where each
// belongs. A stack of layers is a whole memory or disk: the topmost layer that
// mentions a unit decides what it holds. Memory stacks are mapped by the
// virtual machine itself; Disk in this package is a disk stack with a writable
// top.
//
// The file format is written down in docs/snapshot-format.md.
package layer
