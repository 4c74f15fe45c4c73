package store

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

var (
	// ErrNotFound: no snapshot or image has the name.
	ErrNotFound = errors.New("not found")
	// ErrExists: the name is taken.
	ErrExists = errors.New("already exists")
	// ErrFinished: the writer was committed or aborted before.
	ErrFinished = errors.New("writer is finished")
)

// CorruptError says that a published file is not what was published. Reason
// wraps snapshot.ErrMagic, ErrVersion, ErrChecksum, ErrTruncated, ErrTooLarge
// or ErrInvalid.
type CorruptError struct {
	Snapshot string
	File     string // inside the snapshot's directory
	Reason   error
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("snapshot (%s): file %s: %v", e.Snapshot, e.File, e.Reason)
}

func (e *CorruptError) Unwrap() error { return e.Reason }

// fileError tells damage from a host that cannot read right now.
func fileError(name, file string, err error) error {
	for _, damage := range []error{
		snapshot.ErrMagic, snapshot.ErrVersion, snapshot.ErrChecksum,
		snapshot.ErrTruncated, snapshot.ErrTooLarge, snapshot.ErrInvalid,
	} {
		if errors.Is(err, damage) {
			return &CorruptError{Snapshot: name, File: file, Reason: err}
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &CorruptError{Snapshot: name, File: file, Reason: fmt.Errorf("%w: it is missing", snapshot.ErrInvalid)}
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO):
		return &CorruptError{Snapshot: name, File: file, Reason: fmt.Errorf("%w: not a regular file", snapshot.ErrInvalid)}
	}
	return fmt.Errorf("snapshot (%s): file %s: %w", name, file, err)
}
