// Package archive moves snapshots between stores and keeps them compressed.
//
// A snapshot's files are cut into chunks of some ten to some hundred kilobytes,
// at places that their content decides. A chunk is addressed by the SHA-256 of its
// bytes, so that the same chunk is stored once, whichever snapshots it is from. An
// index says which chunks make which files.
//
// Chunks and indices are kept in a Directory, which any number of snapshots may
// share, or travel as one stream of one snapshot. The formats are written down,
// byte by byte, in docs/archive-format.md. Everything that is read is checked.
package archive
