// Package store keeps snapshots and images in a directory:
//
//	<root>/snapshots/<name>/manifest.json, state, memory-….layer, disk-….layer
//	<root>/images/<name>/…
//	<root>/tmp/          what is being made or removed
//
// A snapshot is made under tmp and appears under its name by one rename, after
// everything in it is durable: what is listed is complete. Its files are
// read-only and never change; a layer that several snapshots share is one file
// with several hard links, so the file system counts the references.
//
// Any number of processes may use a store at once.
package store
