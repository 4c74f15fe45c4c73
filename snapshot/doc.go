// Package snapshot defines the bytes of a snapshot at rest: the state file
// (vCPUs and devices, as named sections that this package does not interpret)
// and the manifest (what the snapshot is and which files belong to it).
//
// Memory pages and disk blocks are layers, see snapshot/layer. Directories,
// publishing and checking whole snapshots are snapshot/store's. The formats
// are written down, byte by byte, in docs/snapshot-format.md.
//
// Everything read here is untrusted: sizes are checked before memory is
// reserved, and a damaged file is an error, never a panic.
package snapshot
