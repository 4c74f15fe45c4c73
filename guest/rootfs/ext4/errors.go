package ext4

import (
	"errors"
	"fmt"
)

// ErrName says that a directory entry cannot have this name: empty, ".", "..", longer than 255 bytes, or with a slash or a zero byte.
var ErrName = errors.New("not a possible file name")

// TooLargeError says that the content does not fit into the image.
type TooLargeError struct {
	Need int64 // bytes that would have been needed so far; the whole content may need more
	Size int64 // bytes that the image may have
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("content needs at least %d MiB, the image has %d MiB", (e.Need+1<<20-1)>>20, e.Size>>20)
}

// ConflictError says that an entry would replace one that it cannot replace.
type ConflictError struct{ Name, Reason string }

func (e *ConflictError) Error() string { return fmt.Sprintf("%q %s", e.Name, e.Reason) }

// LimitError says that an entry is beyond what the format, or this writer, can hold.
type LimitError struct{ What string }

func (e *LimitError) Error() string { return e.What }
