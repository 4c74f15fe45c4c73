package snapshot

import "errors"

// What can be wrong with a file at rest. Every reader in this package and in
// snapshot/layer checks a header in the order magic, version, checksum and
// stops at the first fault, so a file of a later version is reported as that
// and not as a damaged one. Test with errors.Is.
var (
	// ErrMagic: the file is of another kind altogether.
	ErrMagic = errors.New("not a forkvm file of this kind")
	// ErrVersion: the kind is right, this build does not read the version.
	ErrVersion = errors.New("unsupported format version")
	// ErrChecksum: the bytes are not those that were written.
	ErrChecksum = errors.New("checksum mismatch")
	// ErrTruncated: the file is shorter than it says it is.
	ErrTruncated = errors.New("file is cut short")
	// ErrTooLarge: a size is above the limit of the format. It is returned
	// before memory is reserved for that size.
	ErrTooLarge = errors.New("size above the format's limit")
	// ErrInvalid: intact bytes that do not make sense.
	ErrInvalid = errors.New("invalid content")
)
